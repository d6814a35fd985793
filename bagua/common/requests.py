"""Requests to the engine over arrays of one kind, which is what operations are made of."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from bagua.common.arrays import Arrays
from bagua.common.config import nearest
from bagua.common.core import core
from bagua.common.errors import BaguaError, UsageError
from bagua.common.handle import Handle
from bagua.common.kinds import Kind, ReduceOp, Urgency
from bagua.common.process_set import ProcessSet, checked
from bagua.common.warn import warn
from bagua.common.world import world


def refuse_quietly(kind: Kind, name: str, process_set: ProcessSet, problem: str) -> None:
    """The ranks that make this call hear why this one does not. It neither waits nor raises."""
    with contextlib.suppress(BaguaError):  # the refusal itself; or the engine has ended
        core.refuse(world().engine, kind, name, process_set._id(), problem)


@contextlib.contextmanager
def counted(earlier: int, failures: int) -> Iterator[None]:
    """What is asked for meanwhile meets only what was asked for as often in the other ranks' step,
    after as many backward passes that had failed; else it is an error."""
    core.count_steps(earlier, failures)
    try:
        yield
    finally:
        core.count_steps(0, 0)


class Requests:
    """Each starts one and returns its `Handle`, whose result is a list of arrays."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

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
        codec: str = "",
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
            checked(process_set)._id(),
            splits,
            urgency,
            pairs,
            None,
            codec,
        )

    def refuse(
        self, kind: Kind, name: str | None, process_set: ProcessSet, problem: str
    ) -> NoReturn:
        """Raises, here and on the ranks that make the same call."""
        number = checked(process_set)._id()
        core.refuse(world().engine, kind, name or "", number, problem)
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
            self.refuse(kind, name, process_set, str(problem))
        except Exception as problem:  # of the library whose tensors these are
            what = f"{type(problem).__name__} on this rank: {problem}"
            self.refuse(kind, name, process_set, what)
        return pairs

    def checked_op(
        self,
        kind: Kind,
        name: str | None,
        process_set: ProcessSet,
        op: ReduceOp | int | None,
        average: bool | None = None,
    ) -> ReduceOp:
        """The reduction; the others hear if it is none."""
        try:
            return reduce_op(op, average)
        except UsageError as problem:
            self.refuse(kind, name, process_set, str(problem))

    def _root(self, name: str | None, process_set: ProcessSet, root_rank: Any) -> int:
        """The rank; the others hear if it is no number."""
        try:
            return rank_of(root_rank)
        except UsageError as problem:
            self.refuse(Kind.BROADCAST, name, process_set, str(problem))

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
        codec: str = "",
    ) -> Handle:
        op, tensors = self.checked_op(Kind.ALLREDUCE, name, process_set, op, average), list(tensors)
        pairs = self._pairs(Kind.ALLREDUCE, tensors, name, process_set, self._beside)
        handle = self._submit(
            Kind.ALLREDUCE, pairs, name, process_set, urgency, op, scales=scales, codec=codec
        )
        return self._gives_new(handle, tensors, pairs)

    def _note_in_place(self, kind: Kind, tensors: Any, is_mean: bool) -> None:
        """Tensors whose values are being replaced; a mean is the same on all ranks."""

    def _broadcast(
        self,
        tensors: Sequence[Any],
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        root = self._root(name, process_set, root_rank)
        pairs = self._pairs(Kind.BROADCAST, tensors, name, process_set, self._beside)
        handle = self._submit(Kind.BROADCAST, pairs, name, process_set, urgency, root=root)
        return self._gives_new(handle, tensors, pairs)

    def _broadcast_(
        self,
        tensors: Any,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
        urgency: Urgency,
    ) -> Handle:
        root = self._root(name, process_set, root_rank)
        handle = self._write_back(Kind.BROADCAST, tensors, name, process_set, urgency, root=root)
        self._note_in_place(Kind.BROADCAST, tensors, False)
        return handle

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
        process_set, tensors = checked(process_set), list(tensors)
        op = self.checked_op(Kind.REDUCESCATTER, name, process_set, op)
        nranks, me = process_set.size(), process_set.rank()

        def share(_: Any, source: Any) -> Any:
            shape = list(self._arrays.describe(source)[2])
            if shape:
                shape[0] = shape[0] // nranks + (me < shape[0] % nranks)
            return self._arrays.empty(shape, source)

        pairs = self._pairs(Kind.REDUCESCATTER, tensors, name, process_set, share)
        handle = self._submit(
            Kind.REDUCESCATTER, pairs, name, process_set, urgency, op, scales=scales
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


_NAMED = {"AVG": ReduceOp.Average} | {known.name.upper(): known for known in ReduceOp}


def rank_of(root_rank: Any) -> int:
    try:
        return operator.index(root_rank)
    except TypeError:
        raise UsageError(f"root_rank={root_rank!r} is no rank") from None


def reduce_op(op: ReduceOp | int | None, average: bool | None = None) -> ReduceOp:
    """The reduction asked for, by `op` or by the older `average` keyword."""
    if average is not None:
        if op is not None:
            raise UsageError("give either op or average (deprecated), not both")
        if isinstance(average, (str, ReduceOp)):  # as the second argument of many a call
            is_name = isinstance(average, str)
            meant = f"name={average!r}" if is_name else f"op={average.name}"
            raise UsageError(
                f"the second argument is the older average=True or False; write {meant}"
            )
        warn("average= is deprecated; use op=Average or op=Sum", FutureWarning)
        return ReduceOp.Average if average else ReduceOp.Sum
    if type(op) is ReduceOp:
        return op
    if op is None:
        return ReduceOp.Average
    try:
        # Other libraries have other numbers, under these names.
        if isinstance(name := getattr(op, "name", None), str):
            return _NAMED[name.upper()]
        if isinstance(op, bool):
            raise ValueError
        return ReduceOp(operator.index(op))
    except (KeyError, TypeError, ValueError):
        names = [known.name for known in ReduceOp]
        hint = nearest(op, names) if isinstance(op, str) else ""
        raise UsageError(
            f"op={op!r} is no reduction; give bagua.{', '.join(names)}{hint}"
        ) from None
