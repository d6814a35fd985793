"""The systems Bagua is measured beside. Each offers the same few operations on torch tensors.

All sum in place, again and again, so what is measured is `zeros`, which a sum leaves as they are:
other values would grow until they are infinite. Since nobody would see a sum of zeros go wrong,
every system proves before that it sums, see `prove`.

Horovod is measured where it can be imported; CONTRIBUTING.md tells how to build it. Its thread
meets the others' every millisecond by MPI, which spins, so it is there in its own turns only.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

import bagua.torch
from bagua.algorithms import Algorithm, GradientAllreduce
from benchmarks.algorithms import distributed
from benchmarks.measure import Turns


class Bagua:
    name = "bagua"

    def __init__(self, algorithm: Algorithm | None = None) -> None:
        self._algorithm = algorithm or GradientAllreduce()

    def allreduce(self, tensor: torch.Tensor, name: str) -> None:
        bagua.torch.allreduce_(tensor, name=name, op=bagua.torch.Sum)

    def allreduce_many(self, tensors: Sequence[torch.Tensor]) -> None:
        start, op = bagua.torch.allreduce_async_, bagua.torch.Sum
        handles = [start(tensor, name=f"many.{i}", op=op) for i, tensor in enumerate(tensors)]
        for handle in handles:
            bagua.torch.synchronize(handle)

    def allreduce_grouped(self, tensors: Sequence[torch.Tensor]) -> None:
        bagua.torch.grouped_allreduce_(tensors, name="grouped", op=bagua.torch.Sum)

    def trainer(self, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        bagua.torch.broadcast_parameters(model.state_dict(), root_rank=0)
        sgd = partial(torch.optim.SGD, lr=1e-3)
        return model, distributed(model, sgd, self._algorithm)


class Gloo:
    """torch.distributed over gloo, and DistributedDataParallel."""

    name = "gloo"

    def __init__(self, comm: MPI.Comm, address: str = "127.0.0.1") -> None:
        """The address is one of rank 0."""
        port = 0
        if comm.rank == 0:
            with socket.create_server((address, 0)) as probe:
                port = probe.getsockname()[1]
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(comm.bcast(port)))
        # The one operation on several tensors is going to be replaced, some day.
        warnings.filterwarnings("ignore", ".*all_reduce_coalesced", FutureWarning)
        torch.distributed.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
        atexit.register(torch.distributed.destroy_process_group)  # its threads abort the end else

    def allreduce(self, tensor: torch.Tensor, name: str) -> None:
        torch.distributed.all_reduce(tensor)

    def allreduce_many(self, tensors: Sequence[torch.Tensor]) -> None:
        works = [torch.distributed.all_reduce(t, async_op=True) for t in tensors]
        for work in works:
            work.wait()

    def allreduce_grouped(self, tensors: Sequence[torch.Tensor]) -> None:
        torch.distributed.all_reduce_coalesced(list(tensors))

    def trainer(self, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        return wrapped, torch.optim.SGD(model.parameters(), lr=1e-3)


class RawMpi:
    """MPI_Allreduce as it is."""

    name = "mpi4py"

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm

    def allreduce(self, tensor: torch.Tensor, name: str) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, tensor.numpy(), MPI.SUM)

    def allreduce_many(self, tensors: Sequence[torch.Tensor]) -> None:
        requests = [self._comm.Iallreduce(MPI.IN_PLACE, t.numpy(), MPI.SUM) for t in tensors]
        MPI.Request.Waitall(requests)


class Alone:
    """No communication: what a training step costs by itself."""

    name = "alone"

    def trainer(self, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)


class Horovod:
    name = "horovod"

    def __init__(self) -> None:
        self._hvd = importlib.import_module("horovod.torch")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self._hvd.init()
        try:
            yield
        finally:
            self._hvd.shutdown()

    def allreduce(self, tensor: torch.Tensor, name: str) -> None:
        self._hvd.allreduce_(tensor, name=name, op=self._hvd.Sum)

    def allreduce_many(self, tensors: Sequence[torch.Tensor]) -> None:
        hvd = self._hvd
        handles = [
            hvd.allreduce_async_(t, name=f"many.{i}", op=hvd.Sum) for i, t in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def allreduce_grouped(self, tensors: Sequence[torch.Tensor]) -> None:
        self._hvd.grouped_allreduce_(list(tensors), name="grouped", op=self._hvd.Sum)

    def trainer(self, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with self.turn():
            return model, self._hvd.DistributedOptimizer(optimizer, model.named_parameters())


def horovods() -> list[Horovod]:
    """One, or none where it cannot be imported."""
    return [Horovod()] if importlib.util.find_spec("horovod") else []


def all_peers(comm: MPI.Comm) -> dict[str, Any]:
    """Every system there is, ours first."""
    systems: list[Any] = [Bagua(), Gloo(comm), RawMpi(comm), Alone(), *horovods()]
    for system in systems:
        with turn_of(system):
            prove(system, comm)
    return {system.name: system for system in systems}


def turn_of(system: Any) -> contextlib.AbstractContextManager[None]:
    """What has to be there while a system is measured, and not while another one is."""
    return system.turn() if hasattr(system, "turn") else contextlib.nullcontext()


def turns(systems: Mapping[str, Any]) -> Turns:
    return {name: partial(turn_of, system) for name, system in systems.items()}


def prove(system: Any, comm: MPI.Comm) -> None:
    """Refuses one whose operations do not sum."""
    operations = {
        "allreduce": lambda tensor: system.allreduce(tensor, "proof"),
        "allreduce_many": lambda tensor: system.allreduce_many([tensor]),
        "allreduce_grouped": lambda tensor: system.allreduce_grouped([tensor]),
    }
    for name, run in operations.items():
        if hasattr(system, name):
            tensor = torch.full((3,), comm.rank + 1.0)
            run(tensor)
            if (wrong := tensor != comm.size * (comm.size + 1) / 2).any():
                raise AssertionError(f"{system.name}.{name} made {tensor[wrong][0]} of the sum")


def zeros(count: int) -> torch.Tensor:
    """Have been written: memory that never was can be one page, which is read out of the caches."""
    return torch.empty(count).zero_()
