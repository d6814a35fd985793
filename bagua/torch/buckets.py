"""Cuts parameters into buckets and lays their gradients into the buckets' arenas.

A *slot* is one parameter's place in a bucket. Its `view` looks at the arena with the parameter's
shape and strides; after an exchange it is the parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from bagua.algorithms import Algorithm, BucketInfo, Exchange
from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.kinds import DTYPE_NUMBER, ReduceOp, Urgency
from bagua.common.process_set import ProcessSet
from bagua.common.world import world


class _Claims:
    """How many optimizers exchange the gradient of a parameter."""

    def __init__(self) -> None:
        self._counts: Any = WeakTensorKeyDictionary()
        self.contested = 0  # parameters of several

    def add(self, param: torch.Tensor) -> None:
        count = self._counts[param] = self._counts.get(param, 0) + 1
        self.contested += count == 2

    def drop(self, param: torch.Tensor) -> None:
        count = self._counts.get(param)
        if count:  # it may be half collected
            self._counts[param] = count - 1
            self.contested -= count == 2


claims = _Claims()
# Gradients that are to be exchanged in place, and those that are under way; a user may make one
# tensor that of two parameters.
_lent: set[int] = set()
_flying: set[int] = set()


class Slot:
    """One parameter's place in a bucket."""

    __slots__ = (
        "bucket",
        "exact",
        "index",
        "may_be_sparse",
        "name",
        "notice",
        "number",
        "param",
        "residuals",
        "view",
    )

    def __init__(self, name: str, param: torch.Tensor, number: int) -> None:
        self.name = name
        self.number = number  # in the order of the optimizer's parameters
        self.param = param
        self.bucket: Bucket | None = None  # None: this gradient travels alone, see loose.py
        self.index = -1
        self.view: torch.Tensor = torch.empty(0)
        self.notice: Any = None  # the engine's hook
        self.exact = True  # no codec
        # What encoding has lost of this rank's values, and of the means that it encodes.
        self.residuals: list[torch.Tensor] = []
        self.may_be_sparse = False  # then its gradient is none of the bucket's business

    def enter(self, bucket: Bucket, index: int, view: torch.Tensor) -> None:
        self.bucket, self.index, self.view = bucket, index, view
        self.notice.bind(bucket.arena, index, view)

    def leave(self) -> None:
        self.bucket = None
        self.notice.unbind()


class Bucket:
    """Slots that are exchanged together, in an arena of the engine."""

    def __init__(
        self,
        name: str,
        info: BucketInfo,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        exchange: Exchange,
        scales: tuple[float, float],
        process_set: ProcessSet,
    ) -> None:
        op = exchange.op
        self.name = name
        self.info = info
        self.slots = list(slots)
        self.averages = op == ReduceOp.Average
        self.casts = slots[0].param.dtype != dtype  # gradients are compressed by a cast
        self.arena = core.Bucket(
            engine=world().engine,
            name=name,
            dtype=DTYPE_NUMBER[dtype_name(dtype)],
            counts=[slot.param.numel() for slot in slots],
            op=op,
            prescale=scales[0],
            postscale=scales[1],
            set=process_set._id(),
            priority=-info.index,
            codec=exchange.wire,
            exact_in_nodes=exchange.hierarchical,
            feedback=exchange.feeds_back,
        )
        self.ready = self.arena.ready
        self.count_quietly = self.arena.count_quietly
        self.handle: Any | None = None
        self.stale = False  # a gradient changed after the launch
        self._lay_out(dtype)
        self._params = [slot.param for slot in self.slots]
        self._notices = [slot.notice for slot in self.slots]
        # Exchanges of several contributions add up to one of their sum only if they are linear.
        linear = op in (ReduceOp.Average, ReduceOp.Sum)
        self._large = self.arena.large if linear else [False] * len(self.slots)
        # Gradients that were taken from their parameters while they are exchanged.
        self._away: list[tuple[Slot, torch.Tensor]] = []

    def _lay_out(self, dtype: torch.dtype) -> None:
        if memoryview(self.arena).nbytes == 0:
            flat = torch.empty(0, dtype=dtype)
        else:
            flat = torch.frombuffer(self.arena, dtype=dtype)
        lost = [
            torch.frombuffer(memory, dtype=torch.float32) if len(flat) else torch.empty(0)
            for memory in self.arena.residuals
        ]
        for index, (slot, begin) in enumerate(zip(self.slots, self.arena.begins)):
            place = slice(begin, begin + slot.param.numel())
            slot.enter(self, index, _view_like(flat[place], slot.param))
            slot.residuals = [residual[place] for residual in lost]

    def launch(self, urgency: Urgency = Urgency.NOW) -> None:
        """Starts the exchange; the arena must not be touched until `deliver`."""
        self.gather(urgency)
        self.start(urgency)

    def gather(self, urgency: Urgency) -> None:
        self.stale = False
        try:
            with torch.no_grad():
                self._gather(urgency)
        except BaseException:
            self._take_back()
            raise

    def start(self, urgency: Urgency) -> None:
        try:
            self.handle = core.launch(self.arena, urgency, self._notices)
        except BaseException:
            self._take_back()
            raise
        _flying.update(id(grad) for _, grad in self._away)
        for slot, _ in self._away:
            slot.param.grad = None  # what backward adds from now on must not land there

    def _gather(self, urgency: Urgency) -> None:
        """Brings gradients that are elsewhere into the arena; none means zeros.

        When backward is over nothing writes to gradients, and most may be read where they are. The
        results of large ones also go there: that costs less.
        """
        views, grads = [], []
        self._take_back()  # of a launch that did not come about
        self._away = []
        reads = urgency == Urgency.WAITED and self.arena.movable
        gather = core.locate if reads else core.gather
        for i in gather(self._params, self._notices):
            slot = self.slots[i]
            grad = slot.param.grad
            if grad is None or (grad.is_sparse and slot.may_be_sparse):
                slot.view.zero_()
            elif id(grad) in _flying:
                raise UsageError(
                    f"the gradient of {slot.name} is also another parameter's, which is being "
                    "exchanged; give each a clone()"
                )
            elif grad.is_sparse:
                raise UsageError(
                    f"{slot.name} got a sparse gradient after dense ones; use sparse_as_dense"
                )
            elif self._large[i] and _may_be_moved(slot, grad):
                slot.notice.lend(grad, grad.data_ptr())
                self._away.append((slot, grad))
                _lent.add(id(grad))
            else:
                views.append(slot.view)
                grads.append(grad)
        if views:
            torch._foreach_copy_(views, grads)

    def deliver(self) -> None:
        """Waits for the exchange, if any, and makes its results the parameters' gradients."""
        firsts: list[tuple[Slot, torch.Tensor]] = []
        if self.handle is not None and self.stale:
            self._wait()
            firsts = self._away
            self.launch()
        if self.handle is None:
            return
        self._wait()
        if self.casts:
            with torch.no_grad():
                self._cast_back()
            return
        core.deliver(self._params, self._notices)
        self._away = []
        with torch.no_grad():
            for slot, first in firsts:
                slot.param.grad.add_(first)  # type: ignore[union-attr]

    def _wait(self) -> None:
        handle, self.handle = self.handle, None
        try:
            handle.wait()  # type: ignore[union-attr]
        except BaseException:
            self._take_back()
            self._away = []  # what they hold now is nobody's gradient
            raise
        self._take_back()

    def _take_back(self) -> None:
        mine = {id(grad) for _, grad in self._away}
        _lent.difference_update(mine)
        _flying.difference_update(mine)

    def discard(self) -> None:
        """Waits for the exchange without using its results; what it moved has gone with it."""
        self._wait()
        self._away = []

    def refuse(self, problem: str) -> None:
        """Raises a UsageError, here and on the ranks that launch this bucket next."""
        self.arena.refuse(problem)

    def _cast_back(self) -> None:
        for slot in self.slots:
            slot.param.grad = slot.view.to(slot.param.dtype)

    def sums_again(self) -> bool:
        """Whether a gradient would be accumulated on top of an exchanged one that is no average.

        Averaging an average changes nothing; summing a sum does.
        """
        return not self.averages and any(slot.param.grad is not None for slot in self.slots)


def _owner_count(tensor: torch.Tensor) -> int:
    """Of its memory; 0, which is no tensor's, where this build of torch does not tell.

    CPU builds once left this out.
    """
    use_count = getattr(torch._C, "_storage_Use_Count", None)
    return int(use_count(tensor.untyped_storage()._cdata)) if use_count else 0


_ONE_OWNER = _owner_count(torch.empty(1)) or -1


def _may_be_moved(slot: Slot, grad: torch.Tensor) -> bool:
    """Whether its memory is laid out like the slot's, and is nobody else's.

    Autograd may have made the gradient a view of a tensor that the rest of backward still reads;
    and another optimizer may exchange the gradient, too.
    """
    return (
        grad.dtype == slot.view.dtype
        and grad.stride() == slot.view.stride()
        and not grad.is_conj()
        and not grad.is_neg()
        and id(grad) not in _lent
        and _owner_count(grad) == _ONE_OWNER
        and not claims.contested
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _view_like(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The slice with the parameter's shape, and its strides where they have no gaps."""
    strided = torch.empty_strided(param.shape, param.stride(), device="meta")
    dense = param.numel() == 0 or strided.untyped_storage().size() == (
        param.numel() * strided.element_size()
    )
    return flat.as_strided(param.shape, param.stride()) if dense else flat.view(param.shape)


class Plan:
    """What decides the buckets of one optimizer."""

    def __init__(
        self,
        prefix: str,
        algorithm: Algorithm,
        op: ReduceOp | None,
        scales: tuple[float, float],
        process_set: ProcessSet,
        wire_dtype: torch.dtype | None,
        bucket_nbytes: int,
    ) -> None:
        self.prefix = prefix
        self.algorithm = algorithm
        self.op = op
        self.scales = scales
        self.process_set = process_set
        self.wire_dtype = wire_dtype
        self.bucket_nbytes = bucket_nbytes
        self._generation = 0

    def build(self, runs: Sequence[Sequence[Slot]], step: int, cut: bool) -> list[Bucket]:
        """Buckets over runs of slots, in order of readiness; `cut` splits a run by size."""
        self._generation += 1
        buckets: list[Bucket] = []
        for run in runs:
            for slots in self._split(run, cut):
                buckets.append(self._bucket(len(buckets), slots, step))
        return buckets

    def _split(self, run: Sequence[Slot], cut: bool) -> list[list[Slot]]:
        """The run by element type and codec, each at most the bucket size, or one tensor."""
        done: list[list[Slot]] = []
        filling: dict[tuple[torch.dtype, bool], tuple[list[Slot], int]] = {}
        for slot in run:
            slot.exact = self._is_exact(slot)
            kind = (slot.param.dtype, slot.exact)
            slots, nbytes = filling.get(kind, ([], 0))
            more = slot.param.numel() * slot.param.element_size()
            if slots and cut and nbytes + more > self.bucket_nbytes:
                done.append(slots)
                slots, nbytes = [], 0
            slots.append(slot)
            filling[kind] = (slots, nbytes + more)
        return done + [slots for slots, _ in filling.values() if slots]

    def _is_exact(self, slot: Slot) -> bool:
        coded = slot.param.dtype in (torch.float32, torch.float16, torch.bfloat16)
        return not coded or self.algorithm.keeps_exact(slot.name, tuple(slot.param.shape))

    def _bucket(self, index: int, slots: Sequence[Slot], step: int) -> Bucket:
        # All of them are ready at the launch; the optimizer likes to find them in its own order.
        slots = sorted(slots, key=lambda slot: slot.number)
        dtype = slots[0].param.dtype
        if self.wire_dtype is not None and dtype.is_floating_point:
            dtype = self.wire_dtype
        count = sum(slot.param.numel() for slot in slots)
        name = f"{self.prefix}.bucket.{self._generation}.{index}"
        info = BucketInfo(name, index, dtype_name(dtype), count, count * dtype.itemsize)
        exchange = self.algorithm.plan(info, world(), step)
        if slots[0].exact:
            exchange = replace(exchange, codec="raw", error_feedback=None)
        if self.op is not None:
            exchange = replace(exchange, op=self.op)
        return Bucket(name, info, slots, dtype, exchange, self.scales, self.process_set)
