"""The gradients of one optimizer: hooks that notice them, buckets that exchange them.

A gradient's way: autograd finishes a parameter's gradient and calls its hook, the engine's Notice,
which counts and asks `decide` only where there is something to decide; the last hook of a bucket
launches the bucket's exchange while backward goes on; when backward ends, what is missing is
launched too (a parameter without a gradient counts as zeros, so that ranks may differ in what they
use), everything is waited for, and every `param.grad` is what all ranks share.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from bagua.algorithms import Algorithm
from bagua.common import numpy_ops
from bagua.common.core import core
from bagua.common.errors import BaguaError, UsageError
from bagua.common.kinds import ReduceOp, Urgency
from bagua.common.objects import broadcast_object
from bagua.common.process_set import ProcessSet
from bagua.common.world import world
from bagua.torch import capture, hooks, kept, lost
from bagua.torch.bucket_plan import Plan
from bagua.torch.buckets import Bucket, Fold, Slot, claims
from bagua.torch.checks import check_parameters, checked_names
from bagua.torch.grouping import Grouping
from bagua.torch.loose import Loose
from bagua.torch.own import is_own
from bagua.torch.safety import NonFinite

_optimizer_numbers = itertools.count()
# Who has begun to exchange in which backward pass.
_by_task: dict[int, list[weakref.ref[Gradients]]] = {}


class Gradients:
    """See the module."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        *,
        compression: Any,
        op: ReduceOp | None,
        scales: tuple[float, float],
        num_groups: int,
        groups: Sequence[Sequence[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        algorithm: Algorithm,
        step: int = 0,
    ) -> None:
        config = world().config
        self.passes_per_step = 1
        self.paused = False  # by no_sync
        self._optimizer = optimizer
        self._names = checked_names(optimizer, named_parameters)
        self._process_set = process_set
        self._sparse_as_dense = sparse_as_dense
        # Ranks outside a process set have not made its optimizers: one rank does the counting.
        self._number, self._overlaps = broadcast_object(
            (next(_optimizer_numbers), world().overlaps(torch.get_num_threads())),
            process_set.ranks[0],
            process_set=process_set,
        )
        self._plan = Plan(
            f"optimizer.{self._number}",
            algorithm,
            op,
            scales,
            process_set,
            compression.wire_dtype,
            int(config.bucket_mb * 2**20),
            fold_of(optimizer, algorithm),
        )
        self._loose = Loose(self._plan, compression)
        self._grouping = Grouping(num_groups, groups)
        self._params: list[torch.Tensor] = []  # what refresh saw last
        self._required: list[bool] = []  # which of them require a gradient
        self._hooks: dict[torch.Tensor, Any] = {}
        self._slots: dict[torch.Tensor, Slot] = {}
        self._buckets: list[Bucket] = []
        self._order: list[Slot] | None = [] if config.learn_bucket_order else None
        self._numbers = itertools.count()  # of slots
        self._step = step
        self._passes = 0  # backward passes that only accumulated
        self._in_backward = False
        # What autograd calls when it ends, and forgets when it has ended or raised.
        self._end: Any = lambda: None
        self._silent = False  # this pass only accumulates
        self._launched = 0  # buckets, in this pass
        self._all_gathered = False
        self._launch_error: BaseException | None = None
        self._task = -1  # the backward pass, as autograd counts them
        self._exchanged = False  # since the last step
        self._unshared = False  # local gradients that no exchange has seen
        self._agreed_on_sparse = False
        self._rebuild_due = False  # some slots have left their buckets
        self._loaded: dict[str, Any] | None = None  # state that is to be taken up
        self._state_due = False
        self._watch = None
        if config.check_finite != "off":
            self._watch = NonFinite(process_set, f"{self._plan.prefix}.finite")
        self.skips = False  # the next step, since gradients are no numbers
        self.refresh()
        self._state_due = self._keeps_something()

    def __del__(self) -> None:
        self.close()

    @property
    def algorithm(self) -> Algorithm:
        return self._plan.algorithm

    def change(self, algorithm: Algorithm) -> None:
        """Goes on with another algorithm; what was lost so far is not, where it still counts."""
        self.look_again()
        self._plan.fold = fold_of(self._optimizer, algorithm)
        before, self._plan.algorithm = self._plan.algorithm, algorithm
        self._rebuild([bucket.slots for bucket in self._buckets], exactly=True)
        if _residuals_of(before) != _residuals_of(algorithm):
            lost.restore(None, self._buckets)
        self._state_due = self._keeps_something()

    def settle(self) -> None:
        """Replicas are equal at any time."""

    def close(self) -> None:
        """Leaves the parameters alone, and their gradients as they are."""
        hooks, self._hooks = getattr(self, "_hooks", {}), {}
        for param, hook in hooks.items():
            hook.remove()
            claims.drop(param)

    # ---- called by autograd --------------------------------------------------------------------

    def decide(self, param: torch.Tensor) -> None:
        """Its gradient is there, and it may be the first or the last of something."""
        if param not in self._slots:
            return
        slot = self._slots[param]
        if self._in_backward and self._end() is None:
            self._abandon_backward()  # the one before has raised
        if not self._in_backward:
            self._begin_backward()
        if self._silent:
            return
        if self._order is not None:
            self._order.append(slot)
        bucket = slot.bucket
        if bucket is None:
            return
        if bucket.handle is not None:
            if slot.param.grad is slot.view:
                raise UsageError(
                    f"{slot.name} got a second contribution in one backward while the first "
                    "was being exchanged in the same memory; use zero_grad(set_to_none=True) "
                    "or checkpoint(..., use_reentrant=False)"
                )
            if not bucket.averages and any(s.param.grad is s.view for s in bucket.slots):
                raise UsageError(
                    f"{slot.name} got a second contribution in one backward after the first was "
                    "exchanged; unless averages travel as they are, use "
                    "zero_grad(set_to_none=True) or checkpoint(..., use_reentrant=False)"
                )
            bucket.stale = True  # a second contribution in one backward: launch once more
        elif bucket.ready(slot.index) and self._overlaps and not self._waits(bucket):
            self._launched += 1
            # Backward is about to end with the last one, and its end to wait and drive.
            last = self._launched == len(self._buckets)
            bucket.launch(Urgency.SOON if last else Urgency.NOW)

    def _waits(self, bucket: Bucket) -> bool:
        """Whether it is launched only when backward is over."""
        contested = claims.contested and any(
            claims.is_contested(slot.param) for slot in bucket.slots
        )
        return self._state_due or bool(contested)

    def notice_failure(self) -> None:
        """Autograd has forgotten a pass; unless it has ended, the next hook has to notice."""
        if self._in_backward:
            for bucket in self._buckets:
                bucket.count_quietly(False)

    def _begin_backward(self) -> None:
        if self._exchanged and any(bucket.sums_again() for bucket in self._buckets):
            raise UsageError(
                "backward ran twice before step(), on top of gradients that ranks have exchanged "
                "and that are no plain averages; use backward_passes_per_step, no_sync() or "
                "zero_grad()"
            )
        if self._watch is not None:
            capture.refuse("check_finite has the host look at numbers; turn it off")
        if self._order is not None or self._rebuild_due or self._state_due:
            capture.refuse("ranks settle on buckets first; take two before")
        self._in_backward = True
        self._unshared = True
        self._silent = self.paused or self._passes + 1 < self.passes_per_step
        end = hooks.End(self)
        self._end = weakref.ref(end, hooks.on_forgotten(self))
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._task = torch._C._current_graph_task_id()
        _by_task.setdefault(self._task, []).append(weakref.ref(self))
        if self._order is None and not self._silent:
            for bucket in self._buckets:
                bucket.count_quietly(True)

    def end_backward(self) -> None:
        self._in_backward = False
        # Before anybody waits, everything that this pass has gradients for is launched: another
        # rank may wait for any of it first. In one order, since the first time may wait, too.
        alive = [other for other in (ref() for ref in _by_task.pop(self._task, [])) if other]
        alive = sorted(alive, key=lambda gradients: gradients._number)
        alive = [other for other in alive if not other._silent]
        if claims.contested:  # the result of one may be where another's gradient is
            for other in alive:
                other._gather_rest()
        for other in alive:
            other._launch_rest()
        if self._silent:
            self._passes += not self.paused
            return
        self._exchange()

    # ---- the exchange --------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Launches what is not under way, waits for everything, delivers."""
        self._launch_rest()
        errors = [] if self._launch_error is None else [self._launch_error]
        # Whatever failed: nothing may still be in flight when the caller touches gradients again.
        waits = [bucket.advance for bucket in self._buckets]
        waits += [bucket.deliver for bucket in self._buckets]
        for wait in [*waits, self._loose.deliver]:
            try:
                wait()
            except BaseException as error:
                errors.append(error)
        found = "" if errors else self._not_finite()
        self._reset()
        if errors:
            raise errors[0]
        self._exchanged = True
        self._unshared = False
        self._tell(found)

    def _not_finite(self) -> str:
        """What any rank has found, in what does not travel, too: a step is for all parameters."""
        if self._watch is None:
            return ""
        own = [(self._name(param), param) for param in self._params if is_own(param)]
        self._watch.look("own", own)
        return self._watch.agreed()

    def _tell(self, found: str) -> None:
        """Which gradients were no numbers; the same on all ranks."""
        self.skips = bool(found) and world().config.check_finite == "skip"
        if found and self._process_set.rank() == 0:
            skipped = "; the step is skipped on all ranks" if self.skips else ""
            warnings.warn(f"step {self._step}: NaN or Inf in {found}{skipped}", stacklevel=4)

    def _launch_rest(self) -> None:
        """Launches what is not under way; once. What goes wrong is told by `_exchange`."""
        self._gather_rest()
        if self._launch_error is not None:
            return
        try:
            for bucket in self._buckets:
                if bucket.handle is None:
                    bucket.start(Urgency.WAITED)
        except BaseException as error:
            self._note_error(error)

    def _gather_rest(self) -> None:
        if self._all_gathered:
            return
        self._all_gathered = True
        try:
            self._take_up_state()
            self._find_sparse()
            self._loose.launch(None if self._watch is None else self._watch.look)
            # All are read before any is written: two parameters may have one gradient.
            for bucket in self._buckets:
                if bucket.handle is None:
                    bucket.gather(Urgency.WAITED)
        except BaseException as error:
            self._note_error(error)

    def _note_error(self, error: BaseException) -> None:
        self._launch_error = error
        self._refuse_rest(f"{type(error).__name__} on this rank: {error}")

    def _refuse_rest(self, problem: str) -> None:
        """Other ranks that wait for what was not launched hear why."""
        for bucket in self._buckets:
            if bucket.handle is None:
                with contextlib.suppress(BaguaError):
                    bucket.refuse(problem)
        self._loose.refuse_rest(problem)

    def _reset(self) -> None:
        """Forgets what a pass has begun, also after an error in the middle of it."""
        self._in_backward = False
        self._passes = 0
        self._launched = 0
        self._all_gathered = False
        self._launch_error = None
        if self._watch is not None:
            self._watch.forget()
        for bucket in self._buckets:
            bucket.handle, bucket.stale = None, False

    def synchronize(self) -> None:
        """Exchanges unless everything there is has been exchanged."""
        self.look_again()
        if self._unshared or not self._exchanged:
            self._exchange()

    def equal_now(self) -> bool:
        """All replicas are, at any time."""
        return True

    def zeroed(self) -> None:
        """There are no gradients any more, so there are none to exchange before a step."""
        self._exchanged = self._unshared = False
        self.skips = False
        self._passes = 0

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self._step += 1
        self.skips = False
        self._exchanged = False
        self._unshared = False
        self._passes = 0
        if self._order is not None:
            self._learn_order()
        elif self._rebuild_due:
            self._rebuild([[slot for bucket in self._buckets for slot in bucket.slots]])
        self._rebuild_due = False

    def _abandon_backward(self) -> None:
        """The last backward raised before its end, so its gradients are not what others expect.

        What it launched is waited for; the rest is refused, so that other ranks that wait for it
        hear why.
        """
        _by_task.pop(self._task, None)
        if not self._silent:
            self._refuse_rest("backward raised an exception on this rank")
        for bucket in self._buckets:
            if bucket.handle is not None:
                with contextlib.suppress(BaguaError):
                    bucket.discard()
        self._loose.discard()
        self._reset()
        self._exchanged = False

    # ---- which parameters, in which buckets ----------------------------------------------------

    def look_again(self) -> None:
        """Notices what happened behind our back: a backward that failed, other parameters."""
        if self._in_backward:
            self._abandon_backward()
        self.refresh()

    def refresh(self) -> None:
        """Notices parameters that were added, frozen or thawed since the last look."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        # Twice a step, and a model may have thousands.
        if core.unchanged(lists, self._params, self._required):
            return
        self._params = [p for params in lists for p in params]
        self._required = [p.requires_grad for p in self._params]
        wanted = [p for p in self._params if p.requires_grad and not is_own(p)]
        for param in set(self._hooks).difference(wanted):
            self._hooks.pop(param).remove()
            claims.drop(param)
            slot = self._slots.pop(param)
            if param.grad is slot.view and not slot.view.any():
                param.grad = None  # the zeros of an exchange; a frozen parameter is not stepped
            self._loose.drop(param)
        fresh = [param for param in wanted if param not in self._hooks]
        known = [slot for bucket in self._buckets for slot in bucket.slots]
        known = [slot for slot in known if slot.param in self._slots]
        # Gradients become ready from the last layer to the first.
        added = [Slot(self._name(p), p, next(self._numbers)) for p in fresh][::-1]
        decide = hooks.on_gradient(self)
        for slot in added:
            slot.notice = core.notice(decide)
            slot.may_be_sparse = not self._agreed_on_sparse
            self._slots[slot.param] = slot
            if self._loose.wants_all:
                self._loose.add(slot)
            self._hooks[slot.param] = slot.param.register_post_accumulate_grad_hook(slot.notice)
            claims.add(slot.param)
        check_parameters(((s.name, s.param) for s in (*known, *added)), self._process_set)
        self._rebuild([known, added])
        self._unshared = self._unshared or any(s.param.grad is not None for s in added)

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [(self._name(param), param) for param in self._params if not is_own(param)]

    def _name(self, param: torch.Tensor) -> str:
        return self._names.setdefault(param, f"parameter.{len(self._names)}")

    def _rebuild(self, runs: Sequence[Sequence[Slot]], exactly: bool = False) -> None:
        """Lays out buckets anew; `exactly`: a run is a bucket."""
        layout = [bucket.slots for bucket in self._buckets]
        views = {slot: slot.view for slots in layout for slot in slots}
        residuals = {slot: slot.residuals for slot in views}
        for slot in views:
            slot.leave()
        runs = [[slot for slot in run if not self._loose.has(slot.param)] for run in runs]
        if not exactly:
            runs = self._grouping.apply([slot for run in runs for slot in run]) or runs
        self._buckets = self._plan.build(runs, self._step, cut=not (exactly or self._grouping))
        for bucket in self._buckets:
            bucket.watch = None if self._watch is None else self._watch.look
        same = layout == [bucket.slots for bucket in self._buckets]
        lost.carry_over(residuals, self._buckets, everything=same)
        for slot, view in views.items():
            if slot.param.grad is view and slot.param in self._slots:
                slot.view.copy_(view)
                slot.param.grad = slot.view

    # ---- what is kept from step to step --------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        if self._loaded is not None:
            return self._loaded
        if not self._keeps_something():
            return None
        names = [[slot.name for slot in bucket.slots] for bucket in self._buckets]
        return {
            "identity": self._identity(),
            "layout": (self._step, self._order is None, names),
            "lost": lost.by_name(self._buckets),
        }

    def load_state(self, loaded: dict[str, Any] | None, step: int) -> None:
        """It is taken up in the next exchange, where all ranks are."""
        self._loaded, self._step = loaded, step
        self._state_due = self._keeps_something()

    @property
    def state_due(self) -> bool:
        """Whether ranks agree on what they have loaded, in the next exchange."""
        return self._state_due

    def go_to(self, step: int, state_due: bool) -> None:
        """As all ranks do."""
        self._step, self._state_due = step, state_due

    def _keeps_something(self) -> bool:
        """Codecs whose blocks span parameters give other bits where buckets are laid out anew."""
        return lost.something(self._buckets) or any(b.in_blocks for b in self._buckets)

    def _identity(self) -> dict[str, object]:
        mine = kept.identity(self.algorithm, self._process_set, sorted(self._by_name))
        if not lost.something(self._buckets):  # a layout is everybody's
            del mine["rank"], mine["size"]
        return mine

    def _take_up_state(self) -> None:
        """The ranks agree whether all can, in the first exchange and after loading."""
        if not self._state_due:
            return
        loaded, self._loaded, self._state_due = self._loaded, None, False
        had_loaded = loaded is not None
        name = f"{self._plan.prefix}.state"
        loses = lost.something(self._buckets)  # else it is of buckets, and little
        if not kept.agrees(loaded, self._identity(), name, self._process_set, warns=loses):
            loaded = None
        if loaded is not None:
            _, learned, buckets = loaded["layout"]
            if learned:
                self._order = None
            runs = [[self._by_name[name] for name in names] for names in buckets]
            self._rebuild(runs, exactly=True)
        if had_loaded:
            lost.restore(loaded and loaded["lost"], self._buckets)

    @property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self._slots.values()}

    # The next two agree by sums, which also a rank that has joined takes part in.

    def _learn_order(self) -> None:
        """Lays the buckets out anew in the order in which the first rank's gradients came."""
        order, self._order = self._order or [], None
        slots = list(self._slots.values())
        places = np.zeros(len(slots), np.int64)
        if self._process_set.rank() == 0:
            place = {slot: number for number, slot in enumerate(dict.fromkeys(order), 1)}
            places[:] = [place.get(slot, len(slots) + 1) for slot in slots]
        places = self._agreed("order", places, ReduceOp.Sum)
        learned = [slots[i] for i in np.argsort(places, kind="stable")]
        current = [slot for bucket in self._buckets for slot in bucket.slots]
        if self._rebuild_due or (places.any() and learned != current):
            self._rebuild([learned])

    def _find_sparse(self) -> None:
        """In the first exchange the ranks agree which parameters have sparse gradients."""
        if self._sparse_as_dense:
            for param in self._slots:
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.to_dense()
        if self._agreed_on_sparse:
            return
        slots = list(self._slots.values())
        grads = [slot.param.grad for slot in slots]
        sparse = np.array([grad is not None and grad.is_sparse for grad in grads], np.uint8)
        self._agreed_on_sparse = True
        agreed = self._agreed("sparse", sparse, ReduceOp.Max)
        for slot, is_sparse in zip(slots, agreed):
            slot.may_be_sparse = bool(is_sparse)
            if is_sparse:
                self._loose.add(slot)
        self._rebuild_due = bool(agreed.any())
        moves = self._plan.fold is not None or self.algorithm.momentum_correction
        if self._rebuild_due and moves:
            name = slots[int(agreed.argmax())].name
            raise UsageError(
                f"the gradient of {name} is sparse, and momentum is not: use sparse_as_dense=True "
                "or an optimizer of its own for it"
            )

    def _agreed(self, what: str, values: Any, op: ReduceOp) -> Any:
        name = f"{self._plan.prefix}.{what}"
        return numpy_ops.allreduce(values, name=name, op=op, process_set=self._process_set)


def _residuals_of(algorithm: Algorithm) -> tuple[object, ...]:
    """What residuals are of; where this differs they mean nothing to each other."""
    return algorithm.what, algorithm.hierarchical, bool(algorithm.momentum_correction)


def fold_of(optimizer: torch.optim.Optimizer, algorithm: Algorithm) -> Fold | None:
    """What makes momentum of gradients, where that is what travels."""
    if algorithm.momentum_correction:
        for group in optimizer.param_groups:
            if group.get("momentum") or "betas" in group:
                raise UsageError(
                    f"{algorithm!r} has a momentum of its own, before the exchange; use SGD with "
                    "momentum=0"
                )
    if algorithm.what != "momentum":
        return None
    fold = getattr(optimizer, "fold_gradients", None)
    if fold is None:
        raise UsageError(
            f"{algorithm!r} exchanges the optimizer's momentum, which {type(optimizer).__name__} "
            "does not offer; use bagua.torch.QAdam"
        )
    return fold
