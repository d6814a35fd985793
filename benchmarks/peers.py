"""The systems Bagua is measured beside. Each offers the same few operations on torch tensors."""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

import bagua.torch
from bagua.algorithms import Algorithm, GradientAllreduce
from benchmarks.algorithms import distributed


class Bagua:
    name = "bagua"

    def __init__(self, algorithm: Algorithm | None = None) -> None:
        self._algorithm = algorithm or GradientAllreduce()

    def allreduce(self, tensor: torch.Tensor, name: str) -> None:
        bagua.torch.allreduce_(tensor, name=name, op=bagua.torch.Max)

    def allreduce_many(self, tensors: Sequence[torch.Tensor]) -> None:
        start, op = bagua.torch.allreduce_async_, bagua.torch.Max
        handles = [start(tensor, name=f"many.{i}", op=op) for i, tensor in enumerate(tensors)]
        for handle in handles:
            bagua.torch.synchronize(handle)

    def allreduce_grouped(self, tensors: Sequence[torch.Tensor]) -> None:
        bagua.torch.grouped_allreduce_(tensors, name="grouped", op=bagua.torch.Max)

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
        torch.distributed.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
        atexit.register(torch.distributed.destroy_process_group)  # its threads abort the end else
        self._max = torch.distributed.ReduceOp.MAX

    def allreduce(self, tensor: torch.Tensor, name: str) -> None:
        torch.distributed.all_reduce(tensor, self._max)

    def allreduce_many(self, tensors: Sequence[torch.Tensor]) -> None:
        works = [torch.distributed.all_reduce(t, self._max, async_op=True) for t in tensors]
        for work in works:
            work.wait()

    def allreduce_grouped(self, tensors: Sequence[torch.Tensor]) -> None:
        torch.distributed.all_reduce_coalesced(list(tensors), self._max)

    def trainer(self, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        return wrapped, torch.optim.SGD(model.parameters(), lr=1e-3)


class RawMpi:
    """MPI_Allreduce as it is."""

    name = "mpi4py"

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm

    def allreduce(self, tensor: torch.Tensor, name: str) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, tensor.numpy(), MPI.MAX)

    def allreduce_many(self, tensors: Sequence[torch.Tensor]) -> None:
        requests = [self._comm.Iallreduce(MPI.IN_PLACE, t.numpy(), MPI.MAX) for t in tensors]
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
        self._hvd.init()

    def allreduce(self, tensor: torch.Tensor, name: str) -> None:
        self._hvd.allreduce_(tensor, name=name, op=self._hvd.Max)

    def allreduce_many(self, tensors: Sequence[torch.Tensor]) -> None:
        hvd = self._hvd
        handles = [
            hvd.allreduce_async_(t, name=f"many.{i}", op=hvd.Max) for i, t in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def allreduce_grouped(self, tensors: Sequence[torch.Tensor]) -> None:
        self._hvd.grouped_allreduce_(list(tensors), name="grouped", op=self._hvd.Max)

    def trainer(self, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return model, self._hvd.DistributedOptimizer(optimizer, model.named_parameters())


def horovods() -> list[Horovod]:
    """One, or none where it cannot be imported."""
    return [Horovod()] if importlib.util.find_spec("horovod") else []


def all_peers(comm: MPI.Comm) -> dict[str, Any]:
    """Every system there is, ours first."""
    systems: list[Any] = [Bagua(), Gloo(comm), RawMpi(comm), Alone(), *horovods()]
    return {system.name: system for system in systems}
