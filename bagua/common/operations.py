"""The operations, once for every kind of array.

`Operations` holds all of them; NumPy's instance is made in `numpy_ops.py`, PyTorch's subclass
in `bagua/torch/ops.py`. Each operation has an asynchronous form that returns a `Handle`; the
others start it and wait.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from bagua.common.arrays import Arrays
from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.handle import Handle
from bagua.common.kinds import Kind, ReduceOp, Urgency
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.common.world import world

_ALLREDUCE = Kind.ALLREDUCE  # looked up hundreds of times a step


class Operations:
    """Collective operations on one kind of array."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

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
        """Like `allreduce_async`, in place."""
        return self._reduce_(
            tensor, name, average, op, prescale_factor, postscale_factor, process_set, urgency
        )

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
        own = list(tensors)
        return self._reduce_(
            own, name, average, op, prescale_factor, postscale_factor, process_set, urgency
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
        nranks = process_set.size()
        ((source, _),) = self._pairs(Kind.ALLTOALL, [tensor], name, process_set, None)
        shape = self._arrays.describe(source)[2]
        rows = shape[0] if len(shape) else 0
        if splits is None and rows % nranks:
            self._refuse(
                Kind.ALLTOALL,
                name,
                process_set,
                f"{rows} rows cannot be split evenly over {nranks} ranks; give splits",
            )
        numbers = [rows // nranks] * nranks if splits is None else [int(n) for n in splits]
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

    # ---- how they are made ---------------------------------------------------------------------

    def _submit(
        self,
        kind: Kind,
        pairs: Sequence[tuple[Any, Any]],
        name: str | None,
        process_set: ProcessSet,
        urgency: Urgency,
        op: ReduceOp = ReduceOp.Sum,
        root: int = -1,
        scales: tuple[float, float] = (1.0, 1.0),
        splits: Sequence[int] = (),
    ) -> Handle:
        """One request over (input, output) pairs; the engine allocates where output is None."""
        describe = self._arrays.describe
        tensors = []
        for source, out in pairs:
            address, dtype, shape = describe(source)
            out_address = 0 if out is None else address if out is source else describe(out)[0]
            tensors.append((address, out_address, dtype, shape, self._arrays.device(source)))
        return core.submit(  # type: ignore[no-any-return]
            world().engine,
            kind,
            name or "",
            tensors,
            op,
            root,
            *scales,
            process_set._id(),
            splits,
            urgency,
            pairs,
            None,
        )

    def _refuse(
        self, kind: Kind, name: str | None, process_set: ProcessSet, problem: str
    ) -> NoReturn:
        """Raises, here and on the ranks that make the same call."""
        core.refuse(world().engine, kind, name or "", process_set._id(), problem)
        raise AssertionError("the engine raises what it is told to refuse")

    def _pairs(
        self,
        kind: Kind,
        tensors: Sequence[Any],
        name: str | None,
        process_set: ProcessSet,
        output: Callable[[Any, Any], Any] | None,
    ) -> list[tuple[Any, Any]]:
        """What to send of each tensor, and `output(tensor, source)`, where its result goes."""
        pairs = []
        try:
            for tensor in tensors:
                source = self._arrays.contiguous(tensor)
                self._arrays.describe(source)
                pairs.append((source, output(tensor, source) if output else None))
        except UsageError as problem:
            self._refuse(kind, name, process_set, str(problem))
        return pairs

    def _writable(self, tensor: Any, source: Any) -> Any:
        self._arrays.check_writable(tensor)
        return source

    def _beside(self, tensor: Any, source: Any) -> Any:
        return self._arrays.empty(self._arrays.describe(source)[2], source)

    def _reduce(
        self,
        tensors: Sequence[Any],
        name: str | None,
        average: bool | None,
        op: ReduceOp | None,
        scales: tuple[float, float],
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        op, tensors = reduce_op(op, average), list(tensors)
        pairs = self._pairs(Kind.ALLREDUCE, tensors, name, process_set, self._beside)
        handle = self._submit(Kind.ALLREDUCE, pairs, name, process_set, urgency, op, scales=scales)
        return self._gives_new(handle, tensors, pairs)

    def _reduce_(
        self,
        tensors: Any,
        name: str | None,
        average: bool | None,
        op: ReduceOp | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        if average is not None or type(op) is not ReduceOp:
            op = reduce_op(op, average)
        # The engine reads most tensors by itself, which is worth much when there are hundreds.
        handle = core.submit(
            world().engine,
            _ALLREDUCE,
            name or "",
            tensors,
            op,
            -1,
            prescale,
            postscale,
            process_set._id(),
            (),
            urgency,
            tensors,
            tensors,
        )
        if handle is not None:
            return handle  # type: ignore[no-any-return]
        scales = (prescale, postscale)
        return self._write_back(
            Kind.ALLREDUCE, tensors, name, process_set, urgency, op=op, scales=scales
        )

    def _broadcast(
        self,
        tensors: Sequence[Any],
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        pairs = self._pairs(Kind.BROADCAST, tensors, name, process_set, self._beside)
        handle = self._submit(
            Kind.BROADCAST, pairs, name, process_set, urgency, root=int(root_rank)
        )
        return self._gives_new(handle, tensors, pairs)

    def _broadcast_(
        self,
        tensors: Any,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        root = int(root_rank)
        return self._write_back(Kind.BROADCAST, tensors, name, process_set, urgency, root=root)

    def _gather(
        self,
        tensors: Sequence[Any],
        name: str | None,
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        tensors = list(tensors)
        pairs = self._pairs(Kind.ALLGATHER, tensors, name, process_set, None)
        handle = self._submit(Kind.ALLGATHER, pairs, name, process_set, urgency)
        handle.finish = lambda done: [
            self._adopt(done, i, pairs[i][0], tensor) for i, tensor in enumerate(tensors)
        ]
        return handle

    def _scatter(
        self,
        tensors: Sequence[Any],
        name: str | None,
        op: ReduceOp | None,
        scales: tuple[float, float],
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        nranks, me, tensors = process_set.size(), process_set.rank(), list(tensors)

        def share(_: Any, source: Any) -> Any:
            shape = list(self._arrays.describe(source)[2])
            if shape:
                shape[0] = shape[0] // nranks + (me < shape[0] % nranks)
            return self._arrays.empty(shape, source)

        pairs = self._pairs(Kind.REDUCESCATTER, tensors, name, process_set, share)
        handle = self._submit(
            Kind.REDUCESCATTER, pairs, name, process_set, urgency, reduce_op(op), scales=scales
        )
        finish = self._arrays.finish
        handle.finish = lambda _: [finish(out, t) for (_, out), t in zip(pairs, tensors)]
        return handle

    def _write_back(
        self,
        kind: Kind,
        tensors: Any,
        name: str | None,
        process_set: ProcessSet,
        urgency: Urgency,
        **details: Any,
    ) -> Handle:
        """One request that replaces the values of a tensor, or of a list of tensors."""
        several = tensors if isinstance(tensors, list) else [tensors]
        pairs = self._pairs(kind, several, name, process_set, self._writable)
        handle = self._submit(kind, pairs, name, process_set, urgency, **details)

        def finish(_: Any) -> Any:
            for tensor, (_, out) in zip(several, pairs):
                if out is tensor:
                    self._arrays.note_written(tensor)
                else:
                    self._arrays.assign(tensor, out)
            return tensors

        handle.finish = finish
        return handle

    def _gives_new(self, handle: Handle, tensors: Sequence[Any], pairs: Any) -> Handle:
        """The handle with a list of the outputs as its result."""
        handle.finish = lambda _: [
            self._arrays.finish(out, tensor) for tensor, (_, out) in zip(tensors, pairs)
        ]
        return handle

    def _adopt(self, done: Any, index: int, source: Any, like: Any) -> Any:
        """Output `index`, whose number of rows only the exchange told."""
        rows = sum(done.rows(index))
        row_shape = list(self._arrays.describe(source)[2][1:])
        memory = done.output(index, self._row_nbytes(source, row_shape))
        return self._arrays.finish(self._arrays.adopt(memory, [rows, *row_shape], source), like)

    @staticmethod
    def _row_nbytes(source: Any, row_shape: Sequence[int]) -> int:
        nbytes = int(source.itemsize)
        for extent in row_shape:
            nbytes *= int(extent)
        return nbytes


def reduce_op(op: ReduceOp | int | None, average: bool | None = None) -> ReduceOp:
    """The reduction asked for, by `op` or by the older `average` keyword."""
    if average is not None:
        if op is not None:
            raise UsageError("give either op or average (deprecated), not both")
        warnings.warn(
            "average= is deprecated; use op=Average or op=Sum", FutureWarning, _callers_level()
        )
        return ReduceOp.Average if average else ReduceOp.Sum
    if type(op) is ReduceOp:
        return op
    if op is None:
        return ReduceOp.Average
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(known.name for known in ReduceOp)
        raise UsageError(f"op={op!r} is no reduction; give bagua.{names}") from None


def _callers_level() -> int:
    """How far up the first frame outside of this package is, as warnings count."""
    level, frame = 1, sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").startswith("bagua."):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level


def _only(handle: Handle) -> Handle:
    """The handle of a request with one tensor gives that tensor's result, not a list."""
    finish = handle.finish
    handle.finish = lambda done: finish(done)[0]
    return handle
