"""The operations, once for every kind of array.

`Operations` holds all of them; NumPy's instance is made in `bagua/__init__.py`, PyTorch's subclass
in `bagua/torch/ops.py`. Each operation has an asynchronous form that returns a `Handle`; the
others start it and wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Optional, Union

from bagua.common.arrays import Arrays
from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.handle import Handle
from bagua.common.kinds import Kind, ReduceOp, Urgency
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.common.world import world


class Operations:
    """Collective operations on one kind of array."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    # ---- allreduce -----------------------------------------------------------------------------

    def allreduce_async(
        self,
        tensor: Any,
        average: Optional[bool] = None,
        name: Optional[str] = None,
        op: Optional[ReduceOp] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts reducing `tensor` over all ranks of the set into a new array."""
        scales = (prescale_factor, postscale_factor)
        handle = self._reduce([tensor], name, average, op, scales, process_set, urgency, False)
        return _only(handle)

    def allreduce_async_(
        self,
        tensor: Any,
        average: Optional[bool] = None,
        name: Optional[str] = None,
        op: Optional[ReduceOp] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Like `allreduce_async`, in place."""
        op = reduce_op(op, average)
        scales = (prescale_factor, postscale_factor)
        source = self._arrays.contiguous(tensor)
        if source is not tensor:
            handle = self._reduce([tensor], name, None, op, scales, process_set, urgency, True)
            return _only(handle)
        # The way of gradients: hundreds in a row, so nothing is built that they do not need.
        self._arrays.check_writable(tensor)
        pairs = ((source, source),)
        core_handle = self._submit(
            Kind.ALLREDUCE, pairs, name, process_set, urgency, op, scales=scales
        )
        return Handle(core_handle, None, tensor)

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
        average: Optional[bool] = None,
        name: Optional[str] = None,
        op: Optional[ReduceOp] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts reducing several arrays as one request: all of them go, or none."""
        scales = (prescale_factor, postscale_factor)
        return self._reduce(tensors, name, average, op, scales, process_set, urgency, False)

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[Any],
        average: Optional[bool] = None,
        name: Optional[str] = None,
        op: Optional[ReduceOp] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Like `grouped_allreduce_async`, in place."""
        scales = (prescale_factor, postscale_factor)
        return self._reduce(tensors, name, average, op, scales, process_set, urgency, True)

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
        name: Optional[str] = None,
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
        name: Optional[str] = None,
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
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
    ) -> tuple[list[Any], list[list[int]]]:
        """`grouped_allgather`, and for each array how many rows came from each rank."""
        handle = self._gather(tensors, name, process_set, Urgency.WAITED)
        core_handle = handle._core
        return list(handle.wait()), [core_handle.rows(i) for i in range(len(tensors))]

    # ---- broadcast -----------------------------------------------------------------------------

    def broadcast_async(
        self,
        tensor: Any,
        root_rank: int,
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts copying the root's array to everyone, into a new array."""
        return _only(self._broadcast([tensor], root_rank, name, process_set, urgency, False))

    def broadcast_async_(
        self,
        tensor: Any,
        root_rank: int,
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Like `broadcast_async`, in place."""
        return _only(self._broadcast([tensor], root_rank, name, process_set, urgency, True))

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
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
    ) -> list[Any]:
        """`broadcast_` of several arrays, exchanged as one request."""
        handle = self._broadcast(tensors, root_rank, name, process_set, Urgency.WAITED, True)
        return list(handle.wait())

    # ---- alltoall ------------------------------------------------------------------------------

    def alltoall_async(
        self,
        tensor: Any,
        splits: Optional[Any] = None,
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
        *,
        urgency: Urgency = Urgency.SOON,
    ) -> Handle:
        """Starts sending `splits[i]` rows to rank i of the set."""
        arrays = self._arrays
        source = arrays.contiguous(tensor)
        described = arrays.describe(source)
        rows = described[2][0] if len(described[2]) else 0
        nranks = process_set.size()
        if splits is None:
            numbers = [rows // nranks] * nranks
        else:
            numbers = [int(n) for n in splits]

        def finish(core_handle: Any) -> Any:
            out = self._adopt(core_handle, 0, described, source, tensor)
            if splits is None:
                return out
            return out, arrays.like_splits(core_handle.rows(0), splits)

        try:
            handle = self._submit(
                Kind.ALLTOALL, [(source, None)], name, process_set, urgency, splits=numbers
            )
        except UsageError as error:
            if splits is None and rows % nranks:  # the engine told the other ranks
                raise UsageError(
                    f"alltoall: {rows} rows cannot be split evenly over {nranks} ranks; give splits"
                ) from error
            raise
        return Handle(handle, finish)

    def alltoall(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Row blocks from every rank, in rank order; with `splits` also how many came from each."""
        return self.alltoall_async(tensor, *args, urgency=Urgency.WAITED, **kwargs).wait()

    # ---- reducescatter -------------------------------------------------------------------------

    def reducescatter_async(
        self,
        tensor: Any,
        name: Optional[str] = None,
        op: Optional[ReduceOp] = None,
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
        name: Optional[str] = None,
        op: Optional[ReduceOp] = None,
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
        name: Optional[str],
        process_set: ProcessSet,
        urgency: Urgency,
        op: ReduceOp = ReduceOp.Sum,
        root: int = -1,
        scales: tuple[float, float] = (1.0, 1.0),
        splits: Sequence[int] = (),
    ) -> Any:
        """One request over (input, output) pairs; the engine allocates where output is None."""
        describe = self._arrays.describe
        tensors = []
        for source, out in pairs:
            address, dtype, shape = describe(source)
            out_address = 0 if out is None else address if out is source else describe(out)[0]
            tensors.append((address, out_address, dtype, shape))
        return core.submit(
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
        )

    def _reduce(
        self,
        tensors: Sequence[Any],
        name: Optional[str],
        average: Optional[bool],
        op: Optional[ReduceOp],
        scales: tuple[float, float],
        process_set: ProcessSet,
        urgency: Urgency,
        in_place: bool,
    ) -> Handle:
        pairs = self._pairs(tensors, in_place)
        handle = self._submit(
            Kind.ALLREDUCE, pairs, name, process_set, urgency, reduce_op(op, average), scales=scales
        )
        return Handle(handle, self._writes_back(tensors, pairs, in_place))

    def _broadcast(
        self,
        tensors: Sequence[Any],
        root_rank: int,
        name: Optional[str],
        process_set: ProcessSet,
        urgency: Urgency,
        in_place: bool,
    ) -> Handle:
        pairs = self._pairs(tensors, in_place)
        handle = self._submit(
            Kind.BROADCAST, pairs, name, process_set, urgency, root=int(root_rank)
        )
        return Handle(handle, self._writes_back(tensors, pairs, in_place))

    def _gather(
        self,
        tensors: Sequence[Any],
        name: Optional[str],
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        sources = [self._arrays.contiguous(tensor) for tensor in tensors]
        described = [self._arrays.describe(source) for source in sources]
        pairs = [(source, None) for source in sources]
        handle = self._submit(Kind.ALLGATHER, pairs, name, process_set, urgency)

        def finish(core_handle: Any) -> list[Any]:
            return [
                self._adopt(core_handle, i, described[i], sources[i], tensor)
                for i, tensor in enumerate(tensors)
            ]

        return Handle(handle, finish)

    def _scatter(
        self,
        tensors: Sequence[Any],
        name: Optional[str],
        op: Optional[ReduceOp],
        scales: tuple[float, float],
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        nranks, me = process_set.size(), process_set.rank()
        pairs = []
        for tensor in tensors:
            source = self._arrays.contiguous(tensor)
            shape = list(self._arrays.describe(source)[2])
            if shape:
                shape[0] = shape[0] // nranks + (me < shape[0] % nranks)
            pairs.append((source, self._arrays.empty(shape, source)))
        handle = self._submit(
            Kind.REDUCESCATTER, pairs, name, process_set, urgency, reduce_op(op), scales=scales
        )
        finish = self._arrays.finish
        return Handle(handle, lambda _: [finish(out, t) for (_, out), t in zip(pairs, tensors)])

    def _pairs(self, tensors: Sequence[Any], in_place: bool) -> list[tuple[Any, Any]]:
        arrays = self._arrays
        pairs = []
        for tensor in tensors:
            source = arrays.contiguous(tensor)
            if in_place:
                arrays.check_writable(tensor)
                pairs.append((source, source))
            else:
                pairs.append((source, arrays.empty(arrays.describe(source)[2], source)))
        return pairs

    def _writes_back(
        self, tensors: Sequence[Any], pairs: Sequence[tuple[Any, Any]], in_place: bool
    ) -> Any:
        """What turns a finished request into its results."""

        def finish(_: Any) -> list[Any]:
            results = []
            for tensor, (_, out) in zip(tensors, pairs):
                if not in_place:
                    results.append(self._arrays.finish(out, tensor))
                    continue
                if out is not tensor:
                    self._arrays.assign(tensor, out)
                results.append(tensor)
            return results

        return finish

    def _adopt(self, core_handle: Any, index: int, described: Any, source: Any, like: Any) -> Any:
        """Output `index`, whose number of rows only the exchange told."""
        _, _, shape = described
        rows = sum(core_handle.rows(index))
        row_shape = list(shape[1:])
        memory = core_handle.output(index, self._row_nbytes(source, row_shape))
        return self._arrays.finish(self._arrays.adopt(memory, [rows, *row_shape], source), like)

    @staticmethod
    def _row_nbytes(source: Any, row_shape: Sequence[int]) -> int:
        nbytes = int(source.itemsize)
        for extent in row_shape:
            nbytes *= int(extent)
        return nbytes


def reduce_op(op: Optional[Union[ReduceOp, int]], average: Optional[bool] = None) -> ReduceOp:
    """The reduction asked for, by `op` or by the older `average` keyword."""
    if average is not None:
        if op is not None:
            raise UsageError("give either op or average (deprecated), not both")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", FutureWarning, 3)
        return ReduceOp.Average if average else ReduceOp.Sum
    if type(op) is ReduceOp:
        return op
    return ReduceOp.Average if op is None else ReduceOp(op)


def _only(handle: Handle) -> Handle:
    """The handle of a request with one tensor gives that tensor's result, not a list."""
    finish = handle._finish
    assert finish is not None
    handle._finish = lambda core_handle: finish(core_handle)[0]
    return handle
