"""Requests to the engine for tensors as rows of elements, and what is made of their results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from bagua.common.errors import UsageError
from bagua.common.kinds import Kind
from bagua.common.process_set import ProcessSet
from bagua.torch import ops
from bagua.torch_api.parts import flat, needed, part, share
from bagua.torch_api.process_group import world_rank
from bagua.torch_api.reduce_op import AnyOp, ReduceOp, bitwise, engines


@contextlib.contextmanager
def told_to_all(kind: Kind, ranks: ProcessSet) -> Iterator[None]:
    """What is wrong here before a request of this kind is an error on every rank.

    Unnamed requests are matched by their order: who only left one out would get the data of the
    next one in its place.
    """
    try:
        yield
    except UsageError as problem:
        ops.refuse(kind, None, ranks, str(problem))


def scattered(
    source: torch.Tensor | None, like: torch.Tensor, count: int, src: int, ranks: ProcessSet
) -> torch.Tensor:
    """This rank's part of the source on `src`."""
    with told_to_all(Kind.ALLTOALL, ranks):
        world_rank(ranks, src)
        if ranks.rank() == src:
            splits = [count] * ranks.size()
            whole = part(needed(source, "send_tensor", src), 0, sum(splits), exactly=True)
        else:
            splits = [0] * ranks.size()
            whole = like.new_empty(0)
    mine: torch.Tensor = ops.alltoall(whole, splits, process_set=ranks)[0]
    return mine


def gathered(mine: torch.Tensor, dst: int, ranks: ProcessSet) -> torch.Tensor:
    """Everyone's tensors on `dst`, nothing elsewhere."""
    splits = [len(mine) if rank == dst else 0 for rank in range(ranks.size())]
    everyone, counts = ops.alltoall(mine, splits, process_set=ranks)
    if ranks.rank() == dst:
        _check_equal(counts.tolist(), ranks)
    return everyone  # type: ignore[no-any-return]


def from_all(mine: torch.Tensor, ranks: ProcessSet) -> torch.Tensor:
    """Everyone's tensors, on all."""
    (everyone,), (counts,) = ops.allgather_with_rows([mine], process_set=ranks)
    _check_equal(counts, ranks)
    return everyone  # type: ignore[no-any-return]


def _check_equal(counts: Sequence[int], ranks: ProcessSet) -> None:
    for rank, count in enumerate(counts):
        if count != counts[0]:
            raise UsageError(
                f"ranks give equal numbers of elements here, not {counts[0]} as rank "
                f"{ranks.ranks[0]} and {count} as rank {ranks.ranks[rank]}; see alltoall_v"
            )


def target_of(tensor: torch.Tensor | None, dst: int, ranks: ProcessSet) -> torch.Tensor | None:
    """Where the result goes on `dst`; None elsewhere."""
    world_rank(ranks, dst)
    return needed(tensor, "recv_tensor", dst) if ranks.rank() == dst else None


def kind_of(op: AnyOp) -> Kind:
    """Of the request that an allreduce makes."""
    return Kind.ALLGATHER if bitwise(op) else Kind.ALLREDUCE


def reduced(tensor: torch.Tensor, op: AnyOp, ranks: ProcessSet) -> torch.Tensor:
    bits = bitwise(op)
    with told_to_all(kind_of(op), ranks):
        _check_op(tensor, op)
    if bits:
        everyone = ops.allgather(tensor.detach().unsqueeze(0), process_set=ranks)
        return _folded(everyone, bits)
    result: torch.Tensor = ops.allreduce(tensor.detach(), op=engines(op), process_set=ranks)
    return result


def reduced_part(tensor: torch.Tensor, op: AnyOp, ranks: ProcessSet) -> torch.Tensor:
    bits = bitwise(op)
    with told_to_all(Kind.ALLTOALL if bits else Kind.REDUCESCATTER, ranks):
        count = share(tensor, ranks)
        _check_op(tensor, op)
    if bits:
        everyone = ops.alltoall(flat(tensor), process_set=ranks)
        return _folded(everyone.view(ranks.size(), count), bits)
    mine: torch.Tensor = ops.reducescatter(flat(tensor), op=engines(op), process_set=ranks)
    return mine


_FOLDS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def _folded(rows: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    return functools.reduce(_FOLDS[op], rows.unbind(0))


def _check_op(tensor: torch.Tensor, op: AnyOp) -> None:
    bits = bitwise(op)
    if not bits:
        engines(op)
    elif tensor.is_floating_point() or tensor.is_complex():
        raise UsageError(f"{bits.name} is for integers and bools, not {tensor.dtype}")
