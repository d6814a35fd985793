"""Cuts parameters into buckets and lays their gradients into the buckets' arenas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from bagua.algorithms import BucketInfo, Exchange
from bagua.algorithms.exchange import LOSSY
from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp, Urgency
from bagua.common.process_set import ProcessSet
from bagua.torch.arrays import arena_of, is_at_rest, is_on_device, tensor_over, wait_for_last
from bagua.torch.claims import claims
from bagua.torch.slot import Slot, in_memory_like, view_like

# Gradients that are to be exchanged in place, and those that are under way; a user may make one
# tensor that of two parameters.
_lent: set[int] = set()
_flying: set[int] = set()


# Turns gradients of parameters, in these views, into what travels instead.
Fold = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
# Looks at gradients that are about to travel somewhere.
Watch = Callable[[str, Sequence[tuple[str, torch.Tensor]]], None]


class Bucket:
    """Slots that are exchanged together, in an arena of the engine."""

    # Whether what travels is made of gradients, so that all must be in the arena first, and
    # several exchanges do not add up to one.
    transforms = False
    # Whether it keeps something that is the same on all ranks, and of the last exchange.
    replicated = False

    def __init__(
        self,
        name: str,
        info: BucketInfo,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        exchange: Exchange,
        scales: tuple[float, float],
        process_set: ProcessSet,
        fold: Fold | None = None,
    ) -> None:
        op = exchange.op
        self.name = name
        self.info = info
        # What becomes of a gradient, but for what a codec loses.
        kind = "momentum" if fold is not None else op.name
        self.terms = f"{kind} over process set {process_set._id()}, scaled by {scales}"
        self.slots = list(slots)
        self._fold = fold  # makes of gradients in the arena what is to travel
        transforms = self.transforms or fold is not None
        # Whether several exchanges add up to one of their sum.
        self.averages = op == ReduceOp.Average and not transforms
        # How many of a slot's residuals are of this rank alone.
        self.own_residuals = 0 if exchange.hierarchical else 1
        # Whether blocks of values share what they lose, so that it depends on who is in them.
        self.in_blocks = exchange.codec in LOSSY
        self.casts = slots[0].param.dtype != dtype  # gradients are compressed by a cast
        self.arena, self._flat, self._kept = arena_of(
            slots[0].param,
            dtype,
            name=name,
            counts=[slot.param.numel() for slot in slots],
            op=op,
            prescale=scales[0],
            postscale=scales[1],
            set=process_set._id(),
            priority=-info.index,
            codec=exchange.wire,
            exact_in_nodes=exchange.hierarchical,
            kept=exchange.kept,
        )
        self._begins = list(self.arena.begins)
        self.ready = self.arena.ready
        self.count_quietly = self.arena.count_quietly
        self.handle: Any | None = None
        self.odd: Sequence[int] = ()
        self.stale = False  # a gradient changed after the launch
        self.late = any(slot.twice for slot in slots)  # it is launched when backward is over
        self.watch: Watch | None = None
        self._lay_out()
        self._params = [slot.param for slot in self.slots]
        self._notices = [slot.notice for slot in self.slots]
        self._views = [slot.view for slot in self.slots]
        # Exchanges of several contributions add up to one of their sum only if they are linear.
        linear = op in (ReduceOp.Average, ReduceOp.Sum)
        lends = linear and not transforms
        self._large = self.arena.large if lends else [False] * len(self.slots)
        # Gradients that were taken from their parameters while they are exchanged.
        self._away: list[tuple[Slot, torch.Tensor]] = []
        # Of this time: views without a gradient; views, and gradients that are to be copied there.
        self._without: list[torch.Tensor] = []
        self._elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._prepare(exchange, process_set)

    def _prepare(self, exchange: Exchange, process_set: ProcessSet) -> None:
        """What a kind of bucket has beside its arena."""

    def _lay_out(self) -> None:
        for index, (slot, begin) in enumerate(zip(self.slots, self._begins)):
            place = slice(begin, begin + slot.param.numel())
            slot.enter(self, index, view_like(self._flat[place], slot.param))
            slot.residuals = [residual[place] for residual in self._kept]

    def alias(self, index: int) -> torch.Tensor:
        """A slot's part of the arena, which torch takes for other memory; on a device for the
        same, but it counts changes of each by itself."""
        begin, count = self._begins[index], self.slots[index].param.numel()
        if is_on_device(self._flat):
            return self._flat[begin : begin + count].data  # nothing moves it
        return tensor_over(self.arena, self._flat.dtype, begin, count)

    def count_steps(self, earlier: int, failures: int) -> None:
        """How often it has been exchanged in this step, and how many passes have failed so far."""
        self.arena.count_steps(earlier, failures)

    def launch(self, urgency: Urgency = Urgency.NOW) -> None:
        """Starts the exchange; the arena must not be touched until `deliver`."""
        self.look()
        self.fill()
        self.start(urgency)

    def look(self) -> None:
        """Finds the gradients; nothing is written yet."""
        self.stale = False
        if self.watch is not None:
            self.watch(self.name, [(slot.name, slot.param) for slot in self.slots])
        try:
            with torch.no_grad():
                self._look()
        except BaseException:
            self.take_back()
            raise

    @torch.no_grad()
    def fill(self) -> None:
        """Brings gradients that are elsewhere into the arena; none means zeros."""
        try:
            changed = core.fill(self._views, self._notices, self._elsewhere)
            self._elsewhere += [self._place_of(i) for i in changed]
            if self._without:
                torch._foreach_zero_(self._without)
            if self._elsewhere:
                views, grads = zip(*self._elsewhere)
                torch._foreach_copy_(views, grads)
                self.arena.touch(2 * sum(view.nbytes for view in views))
            core.part(self.arena)
            self._transform()
        except BaseException:
            self.take_back()
            raise
        finally:
            self._without, self._elsewhere = [], []

    def _place_of(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a gradient that another thread has moved since it was looked at."""
        slot = self.slots[index]
        self._check_kind(slot)
        return slot.view, cast(torch.Tensor, slot.dense_gradient())

    def start(self, urgency: Urgency) -> None:
        try:
            self.handle = core.launch(self.arena, urgency, self._notices)
        except BaseException:
            self.take_back()
            raise
        _flying.update(id(grad) for _, grad in self._away)
        for slot, _ in self._away:
            slot.param.grad = None  # what backward adds from now on must not land there

    def _look(self) -> None:
        """Large ones stay where they are, and their results go there, if nobody else has them."""
        self.take_back()  # of a launch that did not come about
        self._away, self._without, self._elsewhere = [], [], []
        for i in core.locate(self._params, self._notices):
            slot = self.slots[i]
            self._check_kind(slot)
            alone = self._large[i] and core.holders(slot.param) == _NOBODY_ELSE
            grad = slot.dense_gradient()
            if slot.is_in_arena(grad):
                continue
            if grad is None or (grad.is_sparse and slot.may_be_sparse):
                self._without.append(slot.view)
            elif id(grad) in _flying:
                raise UsageError(
                    f"the gradient of {slot.name} is also another parameter's, which is being "
                    "exchanged; give each a clone()"
                )
            elif grad.is_sparse:
                raise UsageError(
                    f"{slot.name} got a sparse gradient, and in its first exchange a dense one or "
                    "none on all ranks; use sparse_as_dense=True"
                )
            elif core.Bucket.in_an_arena(grad.data_ptr()):
                # It may overlap with the view, and torch does not know.
                self._elsewhere.append((slot.view, grad.clone()))
            elif alone and _may_be_moved(slot, grad):
                slot.notice.lend(grad)
                self._away.append((slot, grad))
                _lent.add(id(grad))
            else:
                self._elsewhere.append((slot.view, grad))

    @torch.no_grad()
    def bring_home(self) -> None:
        """Takes gradients out of the places of others, which will be written to."""
        for i in core.strays(self._params, self._notices):
            slot = self.slots[i]
            grad = slot.param.grad
            dense = grad is not None and grad.layout == torch.strided
            if dense and not slot.is_in_arena(grad) and core.Bucket.in_an_arena(grad.data_ptr()):
                slot.param.grad = grad.clone()

    def _check_kind(self, slot: Slot) -> None:
        now, known = slot.param, slot.view
        same = now.shape == known.shape and now.device == known.device
        if not same or not (self.casts or now.dtype == known.dtype):
            was, is_now = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (known, now))
            raise UsageError(
                f"{slot.name} was {was} when DistributedOptimizer was made, and is {is_now} now: "
                "convert and move the model before"
            )

    def _transform(self) -> None:
        """Makes of the gradients in the arena what is to travel."""
        if self._fold is not None:
            self._fold(self._params, self._views)

    def advance(self) -> None:
        """Takes the exchange as far as it can go before it is delivered."""

    def deliver(self) -> None:
        """Waits for the exchange, if any, and makes its results the parameters' gradients."""
        firsts: list[tuple[Slot, torch.Tensor]] = []
        if self.handle is not None and self.stale:
            self._wait()
            firsts = self._away
            self.count_steps(self.arena.earlier + 1, self.arena.failures)
            self.launch()
        if self.handle is None:
            return
        self.odd = self._wait()
        if self.casts:
            with torch.no_grad():
                self._cast_back()
            return
        for i in core.deliver(self._params, self._notices):
            self.slots[i].deliver()
        self._away = []
        with torch.no_grad():
            for slot, first in firsts:
                slot.param.grad.add_(first)  # type: ignore[union-attr]

    def _wait(self) -> Sequence[int]:
        """Ranks whose values held a NaN or an Inf, as far as this one has reduced them."""
        handle, self.handle = self.handle, None
        try:
            handle.wait()  # type: ignore[union-attr]
        except BaseException:
            self.take_back()
            self._away = []  # what they hold now is nobody's gradient
            raise
        self.take_back()
        return handle.odd  # type: ignore[union-attr]

    def take_back(self) -> None:
        """Gradients that it has looked at are not going to be exchanged, or have been."""
        mine = {id(grad) for _, grad in self._away}
        _lent.difference_update(mine)
        _flying.difference_update(mine)

    def discard(self) -> None:
        """Waits for the exchange without using its results; what it moved has gone with it."""
        self._wait()
        self._away = []

    def at_rest(self) -> bool:
        return is_at_rest(self.arena)

    def end(self) -> None:
        """Waits for what is under way, whatever an interrupt has made of this object."""
        wait_for_last(self.arena)
        self.take_back()
        self.handle, self._away = None, []

    def refuse_rest(self, problem: str) -> None:
        """Raises a UsageError, here and on the ranks that launch what was not launched here."""
        if self.handle is None:
            self.arena.refuse(problem)

    def _cast_back(self) -> None:
        for slot in self.slots:
            slot.param.grad = slot.view.to(slot.param.dtype)

    def forget(self, slot: Slot) -> None:
        for lost in slot.residuals:
            lost.zero_()

    def sums_again(self) -> bool:
        """Averaging an average changes nothing; summing a sum does."""
        return not self.averages and any(slot.param.grad is not None for slot in self.slots)


def _owner_count(tensor: torch.Tensor) -> int:
    """Of its memory; 0, which is no tensor's, where this build of torch does not tell.

    CPU builds once left this out.
    """
    use_count = getattr(torch._C, "_storage_Use_Count", None)
    return int(use_count(tensor.untyped_storage()._cdata)) if use_count else 0


_ONE_OWNER = _owner_count(torch.empty(1)) or -1


def _holders_at_least() -> tuple[int, ...]:
    """Of a gradient that nobody but its parameter has.

    Empty, which is nobody's, where this build of torch does not tell of its own.
    """
    param = torch.nn.Parameter(torch.empty(1))
    param.grad = torch.empty(1)
    holders = core.holders(param)
    return holders if len(holders) == 2 else ()


_NOBODY_ELSE = _holders_at_least()


def _may_be_moved(slot: Slot, grad: torch.Tensor) -> bool:
    """Whether its memory is laid out like the slot's, and is nobody else's.

    Autograd may have made the gradient a view of a tensor that the rest of backward still reads;
    another optimizer may exchange the gradient, too; and memory that torch cannot resize is another
    process' or another library's.
    """
    return (
        in_memory_like(slot.view, grad)
        and id(grad) not in _lent
        and _owner_count(grad) == _ONE_OWNER
        and grad.untyped_storage().resizable()
        and not grad.untyped_storage().is_shared()
        and not claims.contested
    )
