"""The operations on torch tensors.

The blocking ones that return a new tensor are differentiable (see autograd.py) and may compress;
all others are those of `bagua.common.operations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from bagua.common import joined
from bagua.common.errors import UsageError
from bagua.common.handle import Handle, poll, synchronize
from bagua.common.kinds import Kind, ReduceOp, Urgency
from bagua.common.operations import Operations
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.torch import autograd, sparse
from bagua.torch.arrays import TorchArrays
from bagua.torch.compression import CodecCompressor, Compression, checked
from bagua.torch.uncompiled import uncompiled

Tensors = Sequence[torch.Tensor]


class TorchOperations(Operations):
    """Collective operations on torch tensors."""

    def allreduce(  # Horovod has compression in the middle
        self,
        tensor: torch.Tensor,
        average: bool | None = None,
        name: str | None = None,
        compression: Any = Compression.none,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """The reduction of `tensor` over all ranks of the set; Average unless `op` says otherwise.

        Every rank gets the same bits. Differentiable for Average and Sum.
        """
        scales = (prescale_factor, postscale_factor)
        results = self.grouped_allreduce(
            [tensor], average, name, compression, op, *scales, process_set
        )
        return results[0]

    def grouped_allreduce(
        self,
        tensors: Tensors,
        average: bool | None = None,
        name: str | None = None,
        compression: Any = Compression.none,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[Any]:
        """The reductions of several tensors, exchanged as one request. Differentiable."""
        op = self.checked_op(Kind.ALLREDUCE, name, process_set, op, average)
        wire, ctxs = self._compressed(Kind.ALLREDUCE, name, process_set, compression, tensors)
        scales = (prescale_factor, postscale_factor)
        coded = isinstance(compression, CodecCompressor)
        ops = _Coded(self, compression.wire) if coded else self
        if _tracked(*wire):
            results = autograd.Allreduce.apply(ops, name, op, scales, process_set, *wire)
        else:
            results = ops.grouped_allreduce_async(
                wire, None, name, op, *scales, process_set, urgency=Urgency.WAITED
            ).wait()
        return [compression.decompress(result, ctx) for result, ctx in zip(results, ctxs)]

    def allgather(
        self,
        tensor: torch.Tensor,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Every rank's rows below each other, in rank order; the number of rows may differ.

        Differentiable.
        """
        return self.grouped_allgather([tensor], name, process_set)[0]

    def grouped_allgather(
        self,
        tensors: Tensors,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> list[Any]:
        """`allgather` of several tensors, exchanged as one request. Differentiable."""
        if _tracked(*tensors):
            return list(autograd.Allgather.apply(self, name, process_set, *tensors))
        handle = self.grouped_allgather_async(tensors, name, process_set, urgency=Urgency.WAITED)
        return list(handle.wait())

    def broadcast(
        self,
        tensor: torch.Tensor,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """The root's tensor, on every rank. `root_rank` is a rank of the world, in a set too.

        Differentiable.
        """
        if _tracked(tensor):
            return autograd.Broadcast.apply(self, name, root_rank, process_set, tensor)
        handle = self.broadcast_async(tensor, root_rank, name, process_set, urgency=Urgency.WAITED)
        return handle.wait()

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Any | None = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Row blocks from every rank, in rank order; with `splits` also how many came from each.

        Differentiable.
        """
        if _tracked(tensor):
            return autograd.Alltoall.apply(self, name, splits, process_set, tensor)
        handle = self.alltoall_async(tensor, splits, name, process_set, urgency=Urgency.WAITED)
        return handle.wait()

    def reducescatter(
        self,
        tensor: torch.Tensor,
        name: str | None = None,
        compression: Any = Compression.none,
        op: ReduceOp | None = None,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Any:
        """This rank's share of the rows of the reduction; low ranks take the remainder.

        Differentiable for Average and Sum.
        """
        scales = (prescale_factor, postscale_factor)
        results = self.grouped_reducescatter([tensor], name, compression, op, process_set, *scales)
        return results[0]

    def grouped_reducescatter(
        self,
        tensors: Tensors,
        name: str | None = None,
        compression: Any = Compression.none,
        op: ReduceOp | None = None,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[Any]:
        """`reducescatter` of several tensors, exchanged as one request. Differentiable."""
        op = self.checked_op(Kind.REDUCESCATTER, name, process_set, op)
        scales = (prescale_factor, postscale_factor)
        kind = Kind.REDUCESCATTER
        if isinstance(compression, CodecCompressor):
            self.refuse(kind, name, process_set, f"{compression!r} is for allreduces")
        wire, ctxs = self._compressed(kind, name, process_set, compression, tensors)
        if _tracked(*wire):
            results = autograd.Reducescatter.apply(self, name, op, scales, process_set, *wire)
        else:
            results = self.grouped_reducescatter_async(
                wire, name, op, process_set, *scales, urgency=Urgency.WAITED
            ).wait()
        return [compression.decompress(result, ctx) for result, ctx in zip(results, ctxs)]

    def _compressed(
        self,
        kind: Kind,
        name: str | None,
        process_set: ProcessSet,
        compression: Any,
        tensors: Tensors,
    ) -> tuple[list[Any], list[Any]]:
        """What to exchange, and what decompress needs to know of each."""
        compression = checked(compression)
        try:
            pairs = [compression.compress(tensor) for tensor in tensors]
        except UsageError as problem:
            self.refuse(kind, name, process_set, str(problem))
        return [wire for wire, _ in pairs], [ctx for _, ctx in pairs]

    def _note_in_place(self, kind: Kind, tensors: Any, is_mean: bool) -> None:
        if torch.is_grad_enabled():
            autograd.note_in_place(kind, tensors, is_mean)

    def sparse_allreduce_async(
        self,
        tensor: torch.Tensor,
        name: str | None = None,
        op: ReduceOp | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Starts reducing a sparse COO tensor; the result is one too, not coalesced."""
        return sparse.sparse_allreduce_async(self, tensor, name, op, process_set)


def _tracked(*tensors: Any) -> bool:
    """Whether autograd must see the operation; in forward mode it then says that it cannot."""
    tracked = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tracked
    ):
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tracked)


class _Coded:
    """Allreduces through a codec. What encoding loses is lost; gradients are exact."""

    def __init__(self, ops: TorchOperations, codec: str) -> None:
        self._ops, self._codec = ops, codec
        self.grouped_allreduce = ops.grouped_allreduce  # backward

    def grouped_allreduce_async(
        self,
        tensors: Tensors,
        average: bool | None,
        name: str | None,
        op: ReduceOp,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        scales = (prescale_factor, postscale_factor)
        return self._ops._reduce(
            tensors, name, average, op, scales, process_set, urgency, self._codec
        )


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Takes part in the others' operations with zeros until every rank has joined.

    Returns the last rank that did. `device` is there for Horovod's sake and not needed.
    """
    return joined.join(process_set)


_operations = TorchOperations(TorchArrays())

# Not what does not block: of many small tensors this would be a third of the time.
allreduce = uncompiled(_operations.allreduce)
allreduce_ = uncompiled(_operations.allreduce_)
allreduce_async = _operations.allreduce_async
allreduce_async_ = _operations.allreduce_async_
grouped_allreduce = uncompiled(_operations.grouped_allreduce)
grouped_allreduce_ = uncompiled(_operations.grouped_allreduce_)
grouped_allreduce_async = _operations.grouped_allreduce_async
grouped_allreduce_async_ = _operations.grouped_allreduce_async_
sparse_allreduce_async = _operations.sparse_allreduce_async
allgather = uncompiled(_operations.allgather)
allgather_async = _operations.allgather_async
allgather_with_rows = uncompiled(_operations.allgather_with_rows)
grouped_allgather = uncompiled(_operations.grouped_allgather)
grouped_allgather_async = _operations.grouped_allgather_async
broadcast = uncompiled(_operations.broadcast)
broadcast_ = uncompiled(_operations.broadcast_)
broadcast_async = _operations.broadcast_async
broadcast_async_ = _operations.broadcast_async_
grouped_broadcast_ = uncompiled(_operations.grouped_broadcast_)
alltoall = uncompiled(_operations.alltoall)
alltoall_async = _operations.alltoall_async
reducescatter = uncompiled(_operations.reducescatter)
reducescatter_async = _operations.reducescatter_async
grouped_reducescatter = uncompiled(_operations.grouped_reducescatter)
grouped_reducescatter_async = _operations.grouped_reducescatter_async
refuse = _operations.refuse

__all__ = ["TorchOperations", "join", "poll", "synchronize"]
