"""That all systems do what is measured: sums, of memory that is there."""

from __future__ import annotations

import pytest
from mpi4py import MPI

pytestmark = pytest.mark.ranks(2)


def test_who_does_not_sum_is_found_out(hvd):
    from benchmarks.peers import RawMpi, prove

    class Greatest(RawMpi):
        def allreduce_many(self, tensors):
            for tensor in tensors:
                MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy(), MPI.MAX)

    prove(RawMpi(MPI.COMM_WORLD), MPI.COMM_WORLD)
    with pytest.raises(AssertionError, match=r"mpi4py.allreduce_many made 2.0 of the sum"):
        prove(Greatest(MPI.COMM_WORLD), MPI.COMM_WORLD)


def test_bagua_sums(hvd):
    from benchmarks.peers import Bagua, prove

    prove(Bagua(), MPI.COMM_WORLD)


def test_zeros_are_in_memory():
    from benchmarks.peers import zeros

    def resident() -> int:
        with open("/proc/self/statm") as told:
            return int(told.read().split()[1]) * 4096

    before = resident()
    tensor = zeros(16 << 20)
    assert resident() - before > 0.9 * tensor.nbytes
    assert not tensor.any()
