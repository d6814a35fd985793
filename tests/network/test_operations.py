"""Hosts of several ranks: memory shared inside a host, MPI's messages between hosts.

Hosts are network namespaces, see benchmarks/hosts.py.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from common.everyone import FAMILIES, wide
from torch.testing import assert_close

pytestmark = pytest.mark.ranks((2, 2), (2, 1))

DTYPES = [dtype for family in FAMILIES.values() for dtype in family]
HALVES = (torch.float16, torch.bfloat16)


def counts(dtype: torch.dtype) -> list[int]:
    return [1, 1000, 70_000, (3 << 20) // dtype.itemsize]


class Reduction:
    """What all ranks get of these tensors, and how far from it rounding may take them."""

    def __init__(self, everyone, hosts, tensors, op, prescale=1.0, postscale=1.0) -> None:
        hvd = everyone.hvd
        self._dtype = tensors[0].dtype
        scaled = (prescale, postscale) != (1.0, 1.0)
        exact = [tensor.double() for tensor in tensors] if scaled else tensors
        self._right = everyone.reduced(exact, op, prescale, postscale).to(self._dtype)
        self._bound = None
        if self._dtype in HALVES and op in (hvd.Sum, hvd.Average):
            sums = [torch.stack([wide(tensors[rank]) for rank in ranks]).sum(0) for ranks in hosts]
            factor = abs(prescale * postscale) / (len(tensors) if op == hvd.Average else 1)
            self._bound = self._rounded([factor * sum_ for sum_ in sums])

    def _rounded(self, sums: list[torch.Tensor]) -> torch.Tensor:
        """A host's sum is rounded once, and everyone's once: by half a step, or the next one."""
        info = torch.finfo(self._dtype)
        sizes = sum(sum_.abs() for sum_ in sums) + sum(sums).abs() * 2
        return 0.51 * info.eps * sizes + info.tiny

    def check(self, result: torch.Tensor, what: str) -> None:
        if self._bound is None:
            assert_close(result, self._right, msg=lambda told: f"{what}: {told}")
        else:
            assert result.dtype == self._dtype
            off = (wide(result) - wide(self._right)).abs()
            assert (off <= self._bound).all(), f"{what}: off by up to {off.max()}"


def same_everywhere(hvd, tensors: list[torch.Tensor]) -> bool:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return len(set(hvd.allgather_object(digest.hexdigest()))) == 1


def test_hosts_are_as_asked_for(hvd, hosts, ranks):
    assert sorted(map(len, hosts)) == sorted(ranks)
    (mine,) = [host for host in hosts if hvd.rank() in host]
    assert hvd.local_size() == len(mine)
    assert hvd.is_homogeneous() == (len(set(ranks)) == 1)


# ---- operations --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce(everyone, hvd, hosts, dtype):
    results = []
    for count in counts(dtype):
        tensors = everyone.draw((count,), dtype)
        ops = everyone.ops_for(dtype)
        for op in ops if count < 1 << 20 else ops[::3]:  # millions of bytes take the oracle seconds
            result = hvd.allreduce(tensors[everyone.me], op=op)
            Reduction(everyone, hosts, tensors, op).check(result, f"{op!r} of {count}")
            results.append(result)
    assert same_everywhere(hvd, results)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, *HALVES], ids=str)
def test_scales(everyone, hvd, hosts, dtype):
    scales = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    for count in (1, 1000, 70_000):
        tensors = [tensor * 4 for tensor in everyone.draw((count,), dtype)]
        for op in (hvd.Sum, hvd.Average):
            result = hvd.allreduce(tensors[everyone.me], op=op, **scales)
            right = Reduction(everyone, hosts, tensors, op, *scales.values())
            right.check(result, f"{op!r} of {count}")


def test_grouped_allreduce(everyone, hvd, hosts):
    kinds = [(1, torch.float32), (3000, torch.float64), (70_000, torch.bfloat16), (0, torch.int32)]
    kinds += [(500_000, torch.float32), (1000, torch.int64), (5, torch.float16)]
    groups = [everyone.draw((count,), dtype, seed) for seed, (count, dtype) in enumerate(kinds)]
    for op in (hvd.Sum, hvd.Average, hvd.Max):
        results = hvd.grouped_allreduce([tensors[everyone.me] for tensors in groups], op=op)
        for (count, dtype), tensors, result in zip(kinds, groups, results):
            right = Reduction(everyone, hosts, tensors, op)
            right.check(result, f"{op!r} of {count} {dtype}")


@pytest.mark.parametrize("columns", [1, 3, 5000])
def test_allgather_of_different_numbers_of_rows(everyone, hvd, columns):
    for rows in (lambda r: 2, lambda r: 7 * r + 1, lambda r: (everyone.size - r) % 2, lambda r: 0):
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            tensors = everyone.draw(lambda r, rows=rows: (rows(r), columns), dtype)
            assert torch.equal(hvd.allgather(tensors[everyone.me]), torch.cat(tensors))


def test_broadcast_from_every_rank(everyone, hvd):
    for root in everyone.ranks:
        for count in (0, 1, 1000, 70_000, 750_001):
            tensors = everyone.draw((count,), seed=root)
            assert torch.equal(hvd.broadcast(tensors[everyone.me], root), tensors[root])


@pytest.mark.parametrize("rows", [1, 7, 1000, 50_001])
def test_reducescatter(everyone, hvd, rows):
    for dtype in (torch.float32, torch.int64):
        tensors = everyone.draw((rows, 3), dtype)
        for op in (hvd.Sum, hvd.Average):
            result = hvd.reducescatter(tensors[everyone.me], op=op)
            assert_close(result, everyone.share(everyone.reduced(tensors, op)))


@pytest.mark.parametrize("columns", [1, 3000])
def test_alltoall_with_uneven_splits(everyone, hvd, columns):
    splits = [[(3 * me + 5 * to) % 7 for to in everyone.ranks] for me in everyone.ranks]
    for dtype in (torch.float32, torch.int16):
        tensors = everyone.draw(lambda r: (sum(splits[r]), columns), dtype)
        out, received = hvd.alltoall(tensors[everyone.me], splits=splits[everyone.me])
        parts = [tensor.split(row)[everyone.me] for tensor, row in zip(tensors, splits)]
        assert torch.equal(out, torch.cat(parts))
        assert received.tolist() == [row[everyone.me] for row in splits]


# ---- which way it goes -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_host_sends_what_one_rank_would(hvd, hosts, dtype):
    for count in (70_000, 750_001):
        before = hvd.counters()["sent_nbytes"]
        hvd.allreduce(torch.ones(count, dtype=dtype), op=hvd.Sum)
        sent = hvd.allgather_object(hvd.counters()["sent_nbytes"] - before)
        nbytes = count * dtype.itemsize
        # 2 (k-1)/k N of k hosts, which are two.
        assert [sum(sent[rank] for rank in host) for host in hosts] == [nbytes] * 2


def test_what_is_chosen_is_told(hvd, capfd):
    hvd.shutdown()
    hvd.init(log_level="info")
    capfd.readouterr()
    assert (hvd.allreduce(torch.ones(70_000), op=hvd.Sum) == hvd.size()).all()
    told = capfd.readouterr().err
    hvd.shutdown()
    hvd.init()
    assert f"allreduce over {hvd.size()} ranks uses hierarchical" in told
