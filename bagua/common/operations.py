"""The operations, once for every kind of array.

`Operations` holds all of them; NumPy's instance is made in `numpy_ops.py`, PyTorch's subclass
in `bagua/torch/ops.py`. Each operation has an asynchronous form that returns a `Handle`; the
others start it and wait.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.handle import Handle
from bagua.common.kinds import Kind, ReduceOp, Urgency
from bagua.common.process_set import ProcessSet, checked, global_process_set
from bagua.common.requests import Requests
from bagua.common.world import world

_ALLREDUCE = Kind.ALLREDUCE  # looked up hundreds of times a step


class Operations(Requests):
    """Collective operations on one kind of array."""

    # ---- allreduce -----------------------------------------------------------------------------

    def allreduce_async(
        self,
        tensor: Any,
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts reducing `tensor` over all ranks of the set into a new array."""
        scales = (prescale_factor, postscale_factor)
        return _only(self._reduce([tensor], name, average, op, scales, process_set, urgency))

    def allreduce_async_(
        self,
        tensor: Any,
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Like `allreduce_async`, in place. Of one array, or of a list as of one request."""
        if average is not None or type(op) is not ReduceOp:
            op = self.checked_op(_ALLREDUCE, name, process_set, op, average)
        # The engine reads most tensors by itself, which is worth much when there are hundreds.
        handle = core.submit(
            world().engine,
            _ALLREDUCE,
            name or "",
            tensor,
            op,
            -1,
            prescale_factor,
            postscale_factor,
            0 if process_set is global_process_set else checked(process_set)._id(),
            (),
            urgency,
            tensor,
            tensor,
        )
        if handle is None:
            scales = (prescale_factor, postscale_factor)
            handle = self._write_back(
                Kind.ALLREDUCE, tensor, name, process_set, urgency, op=op, scales=scales
            )
        if getattr(tensor, "requires_grad", True):  # a list does not say; its tensors are asked
            is_mean = op == ReduceOp.Average and prescale_factor * postscale_factor == 1
            self._note_in_place(Kind.ALLREDUCE, tensor, is_mean)
        return handle  # type: ignore[no-any-return]

    def allreduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The reduction of `tensor` over all ranks of the set; Average unless `op` says otherwise.

        Every rank gets the same bits.
        """
        return self.allreduce_async(tensor, *args, urgency=Urgency.WAITED, **kwargs).wait()

    def allreduce_(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Like `allreduce`, in place."""
        return self.allreduce_async_(tensor, *args, urgency=Urgency.WAITED, **kwargs).wait()

    def grouped_allreduce_async(
        self,
        tensors: Sequence[Any],
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts reducing several arrays as one request: all of them go, or none."""
        scales = (prescale_factor, postscale_factor)
        return self._reduce(tensors, name, average, op, scales, process_set, urgency)

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[Any],
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Like `grouped_allreduce_async`, in place."""
        scales = (prescale_factor, postscale_factor)
        return self.allreduce_async_(
            list(tensors), average, name, op, *scales, process_set, urgency=urgency
        )

    def grouped_allreduce(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The reductions of several arrays, exchanged as one request."""
        handle = self.grouped_allreduce_async(tensors, *args, urgency=Urgency.WAITED, **kwargs)
        return list(handle.wait())

    def grouped_allreduce_(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Like `grouped_allreduce`, in place."""
        handle = self.grouped_allreduce_async_(tensors, *args, urgency=Urgency.WAITED, **kwargs)
        return list(handle.wait())

    # ---- allgather -----------------------------------------------------------------------------

    def allgather_async(
        self,
        tensor: Any,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts gathering every rank's rows."""
        return _only(self._gather([tensor], name, process_set, urgency))

    def allgather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Every rank's rows below each other, in rank order; the number of rows may differ."""
        return self.allgather_async(tensor, *args, urgency=Urgency.WAITED, **kwargs).wait()

    def grouped_allgather_async(
        self,
        tensors: Sequence[Any],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts gathering several arrays as one request."""
        return self._gather(tensors, name, process_set, urgency)

    def grouped_allgather(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`allgather` of several arrays, exchanged as one request."""
        handle = self.grouped_allgather_async(tensors, *args, urgency=Urgency.WAITED, **kwargs)
        return list(handle.wait())

    def allgather_with_rows(
        self,
        tensors: Sequence[Any],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> tuple[list[Any], list[list[int]]]:
        """`grouped_allgather`, and for each array how many rows came from each rank."""
        handle = self._gather(tensors, name, process_set, Urgency.WAITED)
        return list(handle.wait()), [handle.rows(i) for i in range(len(tensors))]

    # ---- broadcast -----------------------------------------------------------------------------

    def broadcast_async(
        self,
        tensor: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts copying the root's array to everyone, into a new array."""
        return _only(self._broadcast([tensor], root_rank, name, process_set, urgency))

    def broadcast_async_(
        self,
        tensor: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Like `broadcast_async`, in place."""
        return self._broadcast_(tensor, root_rank, name, process_set, urgency)

    def broadcast(self, tensor: Any, root_rank: int, *args: Any, **kwargs: Any) -> Any:
        """The root's array, on every rank. `root_rank` is a rank of the world, in a set too."""
        kwargs["urgency"] = Urgency.WAITED
        return self.broadcast_async(tensor, root_rank, *args, **kwargs).wait()

    def broadcast_(self, tensor: Any, root_rank: int, *args: Any, **kwargs: Any) -> Any:
        """Like `broadcast`, in place."""
        kwargs["urgency"] = Urgency.WAITED
        return self.broadcast_async_(tensor, root_rank, *args, **kwargs).wait()

    def grouped_broadcast_(
        self,
        tensors: Sequence[Any],
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> list[Any]:
        """`broadcast_` of several arrays, exchanged as one request."""
        own = list(tensors)
        return self._broadcast_(own, root_rank, name, process_set, Urgency.WAITED).wait()  # type: ignore[no-any-return]

    # ---- alltoall ------------------------------------------------------------------------------

    def alltoall_async(
        self,
        tensor: Any,
        splits: Any | None = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts sending `splits[i]` rows to rank i of the set."""
        nranks = checked(process_set).size()
        ((source, _),) = self._pairs(Kind.ALLTOALL, [tensor], name, process_set, None)
        shape = self._arrays.describe(source)[2]
        rows = shape[0] if len(shape) else 0
        try:
            numbers = _numbers(splits, rows, nranks)
        except UsageError as problem:
            self.refuse(Kind.ALLTOALL, name, process_set, str(problem))
        handle = self._submit(
            Kind.ALLTOALL, [(source, None)], name, process_set, urgency, splits=numbers
        )

        def finish(done: Any) -> Any:
            out = self._adopt(done, 0, source, tensor)
            return out if splits is None else (out, self._arrays.like_splits(done.rows(0), splits))

        handle.finish = finish
        return handle

    def alltoall(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Row blocks from every rank, in rank order; with `splits` also how many came from each."""
        return self.alltoall_async(tensor, *args, urgency=Urgency.WAITED, **kwargs).wait()

    # ---- reducescatter -------------------------------------------------------------------------

    def reducescatter_async(
        self,
        tensor: Any,
        name: str | None = None,
        op: ReduceOp | None = None,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts reducing `tensor` over all ranks and keeping this rank's rows."""
        scales = (prescale_factor, postscale_factor)
        return _only(self._scatter([tensor], name, op, scales, process_set, urgency))

    def reducescatter(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """This rank's share of the rows of the reduction; low ranks take the remainder."""
        return self.reducescatter_async(tensor, *args, urgency=Urgency.WAITED, **kwargs).wait()

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[Any],
        name: str | None = None,
        op: ReduceOp | None = None,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts `reducescatter` of several arrays as one request."""
        scales = (prescale_factor, postscale_factor)
        return self._scatter(tensors, name, op, scales, process_set, urgency)

    def grouped_reducescatter(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`reducescatter` of several arrays, exchanged as one request."""
        handle = self.grouped_reducescatter_async(tensors, *args, urgency=Urgency.WAITED, **kwargs)
        return list(handle.wait())


def _numbers(splits: Any, rows: int, nranks: int) -> list[int]:
    """How many rows go to each rank."""
    if splits is None and rows % nranks:
        raise UsageError(f"{rows} rows cannot be split evenly over {nranks} ranks; give splits")
    if splits is None:
        return [rows // nranks] * nranks
    try:
        return [operator.index(n) for n in splits]
    except TypeError:
        raise UsageError(f"splits={splits!r} has to be one whole number for each rank") from None


def _only(handle: Handle) -> Handle:
    """The handle of a request with one tensor gives that tensor's result, not a list."""
    finish = handle.finish
    handle.finish = lambda done: finish(done)[0]
    return handle
