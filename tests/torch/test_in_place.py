"""In-place operations on tensors whose values are, or are not, simply in memory in C order."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.ranks(1, 2, 3)


class Subclass(torch.Tensor):
    """A user's own."""


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


KINDS = {
    "dense": lambda: numbers(4, 3),
    "no dimensions": lambda: numbers(),
    "empty": lambda: numbers(0, 3),
    "parameter": lambda: torch.nn.Parameter(numbers(3)),
    "subclass": lambda: numbers(3).as_subclass(Subclass),
    "inside a storage": lambda: numbers(10)[3:7],
    "stride of an extent of one": lambda: numbers(2, 6)[:, ::6].t(),
    "transposed": lambda: numbers(4, 3).t(),
    "every other": lambda: numbers(10)[::2],
    "channels_last": lambda: numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "many dimensions": lambda: numbers(*[1] * 20, 3),
    "lazily negated": lambda: torch._neg_view(numbers(4)),
    "lazily conjugated": lambda: torch.complex(numbers(4), numbers(4)).conj(),
    "bfloat16": lambda: numbers(4).bfloat16(),
    "complex": lambda: torch.complex(numbers(4), numbers(4)),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_allreduce_(hvd, kind):
    tensor, before = KINDS[kind](), KINDS[kind]().detach().resolve_neg().resolve_conj()
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert_close(tensor.detach().resolve_neg().resolve_conj(), before * hvd.size())


def test_groups_mix_kinds(hvd):
    tensors = [make() for make in KINDS.values()]
    handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum)
    given = list(tensors)
    tensors.clear()  # the list is the caller's
    assert all(a is b for a, b in zip(hvd.synchronize(handle), given))
    for tensor, make in zip(given, KINDS.values()):
        assert_close(
            tensor.detach().resolve_neg().resolve_conj(),
            make().detach().resolve_neg().resolve_conj() * hvd.size(),
        )


def test_broadcast_(hvd):
    for make in KINDS.values():
        tensor = make()
        with torch.no_grad():
            tensor.mul_(hvd.rank() + 1)
        hvd.broadcast_(tensor, root_rank=0)
        assert_close(tensor.detach(), make().detach())


@pytest.mark.parametrize("dtype", "?BbhilqefdFD")
def test_numpy(hvd, dtype):
    import bagua

    array = np.ones((2, 3), dtype)
    assert bagua.allreduce_(array, op=bagua.Sum) is array
    assert array.dtype == dtype
    assert np.array_equal(array, np.ones((2, 3), dtype) * (1 if dtype == "?" else hvd.size()))
    array.flags.writeable = False
    with pytest.raises(bagua.UsageError, match="writable"):
        bagua.allreduce_(array, op=bagua.Max)


def test_numpy_with_the_other_byte_order(hvd):
    import bagua

    with pytest.raises(bagua.UsageError, match="cannot be exchanged"):
        bagua.allreduce_(np.ones(3, ">f4"))


JOB = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "BAGUA_")  # what a process of a job is told
OLDER_TORCH = """
import torch

increment = torch._C._increment_version

def of_one(tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError("one tensor")
    increment((tensor,))

torch._C._increment_version = of_one
del torch.Tensor.__dlpack_c_exchange_api__

import bagua.torch as hvd

hvd.init()
tensors = [torch.ones(3), torch.ones(4)]
for operation in (lambda: hvd.grouped_allreduce_(tensors), lambda: hvd.broadcast_(tensors[0], 0)):
    before = tensors[0]._version
    operation()
    assert tensors[0]._version > before
weights = torch.nn.Parameter(torch.ones(600, 600))
sgd = torch.optim.SGD([weights], lr=0.1)
optimizer = hvd.DistributedOptimizer(sgd, algorithm="low_precision_decentralized")
optimizer.step()
before = weights._version
optimizer.step()
assert weights._version > before
"""


@pytest.mark.ranks(1)
def test_a_torch_without_a_table_of_exchange_hears_of_what_was_written():
    """An older one's tensors offer none, and it may have to be told of one at a time."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(JOB)}
    subprocess.run([sys.executable, "-c", OLDER_TORCH], env=clean, check=True)
