"""The gradients of one optimizer: hooks that notice them, buckets that exchange them.

A gradient's way: autograd finishes a parameter's gradient and calls its hook, the engine's Notice,
which counts and asks `decide` only where there is something to decide; the last hook of a bucket
launches the bucket's exchange while backward goes on; when backward ends, what is missing is
launched too (a parameter without a gradient counts as zeros, so that ranks may differ in what they
use), everything is waited for, and every `param.grad` is what all ranks share.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from bagua.algorithms import Algorithm
from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp
from bagua.common.objects import broadcast_object
from bagua.common.warn import warn
from bagua.common.world import world
from bagua.torch import capture, failed_passes, hooks, lost
from bagua.torch.agreement import check_hyperparameters
from bagua.torch.arrays import is_on_device
from bagua.torch.bucket_plan import Plan, fold_of
from bagua.torch.buckets import Bucket
from bagua.torch.checkpointed import Checkpointed
from bagua.torch.claims import claims
from bagua.torch.driver import Driver
from bagua.torch.grouping import Grouping
from bagua.torch.layout import Layout
from bagua.torch.loose import Loose
from bagua.torch.names import Names
from bagua.torch.safety import NonFinite, Seen, first_not_finite, looks_at_all, spoils
from bagua.torch.sharing import Sharing
from bagua.torch.shipment import Shipment
from bagua.torch.slot import Slot
from bagua.torch.standing import Standing, in_a_hook

_FAILED = "backward raised an exception on this rank"
_all: weakref.WeakSet[Gradients] = weakref.WeakSet()
# Who has begun to exchange in which backward pass.
_by_task: dict[int, list[weakref.ref[Gradients]]] = {}


class Gradients(Driver):
    """See the module."""

    shares_gradients = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        *,
        compression: Any,
        op: ReduceOp | None,
        scales: tuple[float, float],
        num_groups: int,
        groups: Sequence[Sequence[torch.Tensor]] | None,
        sparse_as_dense: bool,
        standing: Standing,
        algorithm: Algorithm,
        step: int = 0,
    ) -> None:
        config = world().config
        self._optimizer = optimizer
        self._process_set = process_set = standing.process_set
        self.standing = standing
        params = [p for group in optimizer.param_groups for p in group["params"]]
        elsewhere = all(is_on_device(param) for param in params)  # it computes, not on the cores
        overlaps = world().overlaps(0 if elsewhere else torch.get_num_threads())
        name, root = standing.name("overlaps"), process_set.ranks[0]
        self._overlaps = broadcast_object(overlaps, root, name, process_set)
        self._plan = Plan(
            standing,
            algorithm,
            op,
            scales,
            compression.wire_dtype,
            int(config.bucket_mb * 2**20),
            fold_of(optimizer, algorithm),
            step,
        )
        self._watch = None
        if looks_at_all():
            self._watch = NonFinite(process_set, standing.name("finite"))
        self._loose = loose = Loose(self._plan, compression)
        self.layout = Layout(
            optimizer,
            names,
            self._plan,
            loose,
            Grouping(num_groups, groups),
            sparse_as_dense,
            hooks.on_gradient(self),
            None if self._watch is None else self._watch.look,
        )
        self._seen = Seen()
        self._passes = 0  # backward passes that only accumulated
        self._in_backward = False
        # What autograd calls when it ends, and forgets when it has ended or raised.
        self._end: Any = lambda: None
        self._silent = False  # this pass only accumulates
        self._came: set[Slot] = set()  # in this pass, until ranks have settled on buckets
        self._task = -1  # the backward pass, as autograd counts them
        self._sharing = Sharing(self.layout)
        self.failures = 0  # of passes, so far
        self._folded: list[int] | None = None  # versions of momentum that was exchanged
        self._told_what_stays = False
        self.refresh()
        self._checkpointed = Checkpointed(self._plan, self.layout)
        self._shipment = Shipment(self._plan, self.layout, loose, self._checkpointed, self._watch)
        _all.add(self)

    def __del__(self) -> None:
        self.close()

    @property
    def algorithm(self) -> Algorithm:  # type: ignore[override]
        return self._plan.algorithm

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return lost.something(self.layout.buckets)

    def change(self, algorithm: Algorithm) -> None:
        """Goes on with another algorithm."""
        self.look_again()
        if algorithm.what == "momentum":
            name = f"{self._plan.prefix}.rules"
            check_hyperparameters(self._optimizer, algorithm, name, self._process_set)
        fold, before = fold_of(self._optimizer, algorithm), (self._plan.algorithm, self._plan.fold)
        self._plan.algorithm, self._plan.fold = algorithm, fold
        try:
            self.layout.rebuild(self.layout.runs, exactly=True)
        except BaseException:
            self._plan.algorithm, self._plan.fold = before
            raise
        self._checkpointed.changed(before[0])

    def settle(self) -> None:
        """Replicas are equal at any time."""

    def close(self) -> None:
        """Leaves the parameters alone, and their gradients as they are."""
        if hasattr(self, "layout"):
            self.layout.close()

    def at_rest(self) -> bool:
        return all(bucket.at_rest() for bucket in self.layout.buckets)

    def withdraw(self, problem: str) -> None:
        """In the middle of a step."""
        self.standing.withdraw(problem)
        _by_task.pop(self._task, None)
        self._shipment.end()
        self._reset()
        self.close()

    # ---- called by autograd --------------------------------------------------------------------

    @in_a_hook
    def decide(self, param: torch.Tensor) -> None:
        """Its gradient is there, and it may be the first or the last of something."""
        if self._in_backward and self._end() is None:
            self._abandon_backward()  # the one before has raised
        if not self._in_backward:
            self._begin_backward(param)
        slot = self.layout.slots.get(param)
        if slot is None or self._silent:
            return
        if self.layout.order is not None:
            self.layout.order.append(slot)
        bucket = slot.bucket
        if bucket is None:
            return
        if bucket.handle is not None or slot in self._came:
            slot.twice = bucket.late = True
        if not self.layout.settled:
            self._came.add(slot)
        if bucket.handle is not None:
            if slot.is_in_arena(slot.param.grad):
                raise UsageError(
                    f"{slot.name} got a second contribution in one backward while the first "
                    "was being exchanged in the same memory; use zero_grad(set_to_none=True) "
                    "or checkpoint(..., use_reentrant=False)"
                )
            if not bucket.averages and any(s.is_in_arena(s.param.grad) for s in bucket.slots):
                raise UsageError(
                    f"{slot.name} got a second contribution in one backward after the first was "
                    "exchanged; unless averages travel as they are, use "
                    "zero_grad(set_to_none=True) or checkpoint(..., use_reentrant=False)"
                )
            bucket.stale = True  # a second contribution in one backward: launch once more
        elif bucket.ready(slot.index) and self._overlaps and not self._waits(bucket):
            self._shipment.launch(bucket)

    def _waits(self, bucket: Bucket) -> bool:
        """Whether it is launched only when backward is over.

        In the first pass that shows which gradients get several contributions: whoever exchanged
        the first alone would have to do so again, and the others may not.
        """
        if bucket.late or not self.layout.settled:
            return True
        contested = claims.contested and any(
            claims.is_contested(slot.param) for slot in bucket.slots
        )
        return self._checkpointed.due or bool(contested)

    def notice_failure(self) -> None:
        """Autograd has forgotten a pass; unless it has ended, the next hook has to notice.

        Others may wait for gradients of it, whatever this rank does next, so they hear at once.
        """
        if not self._in_backward:
            return
        for bucket in self.layout.buckets:
            bucket.count_quietly(False)
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        if not self._silent:
            self._shipment.refuse_rest(_FAILED)
            failed_passes.count(self._task, self.standing.order[0], list(_all))

    def _begin_backward(self, param: torch.Tensor) -> None:
        self.refresh()  # what was frozen or thawed after zero_grad() counts
        if self._sharing.is_zeroed(param):
            self.zeroed()
        self._sharing.check(param)
        if self._watch is not None:
            capture.refuse("check_finite has the host look at numbers; turn it off")
        if not self.layout.settled or self._checkpointed.due:
            capture.refuse("ranks settle on buckets first; take two before")
        self._in_backward = True
        self._sharing.has_own = True
        self._silent = self.paused or self._passes + 1 < self.passes_per_step
        end = hooks.End(self)
        self._end = weakref.ref(end, hooks.on_forgotten(self))
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._task = torch._C._current_graph_task_id()
        if self._task not in _by_task:
            for other in list(_all):  # whose gradients may be where this one's belong
                other.bring_home()
        _by_task.setdefault(self._task, []).append(weakref.ref(self))
        if self._silent:
            return
        self._count_exchanges()
        self._came.clear()
        for bucket in self.layout.buckets:
            bucket.count_quietly(self.layout.settled)

    def _count_exchanges(self) -> None:
        """Else one that a rank makes once more in a step would meet the others' next step."""
        counts = self._loose.counts = self._sharing.exchanges, self.failures
        for bucket in self.layout.buckets:
            bucket.count_steps(*counts)

    def bring_home(self) -> None:
        for bucket in self.layout.buckets if self._overlaps else ():
            bucket.bring_home()

    @in_a_hook
    def end_backward(self) -> None:
        self._in_backward = False
        # Before anybody waits, everything that this pass has gradients for is launched: another
        # rank may wait for any of it first. In one order, since the first time may wait, too.
        alive = [other for other in (ref() for ref in _by_task.pop(self._task, [])) if other]
        alive = sorted(alive, key=lambda gradients: gradients.standing.order)
        alive = [other for other in alive if not other._silent]
        if claims.contested:  # the result of one may be where another's gradient is
            try:
                claims.check(slot for other in alive for slot in other.layout.slots.values())
            except UsageError as error:
                for other in alive:
                    other._shipment.fail(error)
            for other in alive:
                other._shipment.gather_rest()
        for other in alive:
            other._shipment.launch_rest()
        if self._silent:
            self._passes += not self.paused
            return
        try:
            self.exchange(self._task)
        except Exception:
            failed_passes.part([other for other in alive if other is not self], self._task)
            raise

    # ---- the exchange --------------------------------------------------------------------------

    def exchange(self, task: int | None = None) -> None:
        """Launches what is not under way, waits for everything, delivers; of a pass, if any."""
        self._count_exchanges()
        try:
            found = self._shipment.finish()
        except Exception:  # also of this rank alone: the others have heard of it, or stepped
            failed_passes.count(task, self.standing.order[0], list(_all))
            raise
        finally:
            self._reset()
        earlier = (bucket.arena.earlier for bucket in self.layout.buckets)
        self._sharing.exchanged(max(earlier, default=None))
        self._folded = self._versions() if self._plan.fold else None
        skipped = "the step is skipped on all ranks"
        self.skips = spoils(found, self._plan.step, self._process_set, skipped)

    def _reset(self) -> None:
        """Forgets what a pass has begun, also after an error in the middle of it."""
        self._in_backward = False
        self._passes = 0
        self._shipment.forget()

    def synchronize(self) -> None:
        """Exchanges unless everything there is has been exchanged."""
        self.standing.check()
        self.look_again()
        self._sharing.check_step()
        # Another hook may call `step()` in a pass before its gradient comes here.
        ahead = self._task < torch._C._current_graph_task_id()
        if ahead or not self._sharing.complete:
            self.exchange()

    def _versions(self) -> list[int]:
        grads = [param.grad for param in self.layout.slots]
        return [-1 if grad is None else grad._version for grad in grads]

    def equal_now(self) -> bool:
        """All replicas are, at any time."""
        return True

    def zeroed(self) -> None:
        """There are no gradients any more, so there are none to exchange before a step."""
        if self._sharing.done and self.remembers and not self._told_what_stays:
            self._tell_what_stays()
        self._folded = None
        self._sharing.zeroed()
        self.skips = False
        self._passes = 0

    def _tell_what_stays(self) -> None:
        """Of gradients that are thrown away; those that are no numbers leave nothing."""
        named = [(name, param) for name, param in self.named() if param.grad is not None]
        if named and not first_not_finite(named):
            self._told_what_stays = True  # it has the host look
            warn(
                "gradients that ranks have exchanged are thrown away, but what encoding lost of "
                f"them, by {self.algorithm!r}, is added to the next ones. Where the loss of "
                "another model leaves them, as in a GAN, run its backward() in optimizer.no_sync()"
            )

    def stepped(self) -> None:
        """The optimizer has stepped."""
        if self._folded is not None and self._folded != self._versions():
            warn(
                f"{self.algorithm.name or 'the algorithm'} has made momentum of the gradients, "
                "which was changed between backward() and step(), as by clipping: it hardly learns "
                "like that; clip only while it warms up"
            )
        for bucket in self.layout.buckets:
            grads = ((slot.name, slot.param.grad) for slot in bucket.slots)
            there = ((name, grad) for name, grad in grads if grad is not None)
            self._seen.tell(self._plan.step, bucket, "the gradient of", there)
        self._folded = None
        self._plan.step += 1
        self.skips = False
        self._sharing.stepped()
        self._passes = 0
        self.layout.improve()

    def _abandon_backward(self) -> None:
        """The last backward raised before its end, so its gradients are not what others expect.

        What it launched is waited for; the rest is refused, so that other ranks that wait for it
        hear why.
        """
        _by_task.pop(self._task, None)
        self._refuse_rest()
        self._shipment.discard()
        self._reset()
        self._sharing.done = False

    # ---- which parameters, in which buckets ----------------------------------------------------

    def look_again(self) -> None:
        """Notices what happened behind our back: a backward that failed, other parameters."""
        if self._in_backward:
            self._abandon_backward()
        if not self.standing.withdrawn:
            self.refresh()

    def refresh(self) -> None:
        """Notices parameters that were added, frozen or thawed since the last look."""
        has_all = self._sharing.complete
        if not self.layout.refresh(has_all):
            return
        self._sharing.has_own = True
        if has_all and not self.layout.averages:
            raise UsageError(
                "parameters were thawed or added between zero_grad() and step(), when ranks had "
                "exchanged the other gradients already, which are no plain averages: do so before "
                "the optimizer's zero_grad()"
            )

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return self.layout.named()

    # ---- what is kept from step to step --------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        return self._checkpointed.state()

    def load_state(self, loaded: dict[str, Any] | None, step: int) -> None:
        """It is taken up in the next exchange, where all ranks are."""
        self._plan.step = step
        self._checkpointed.load(loaded)

    @property
    def state_due(self) -> bool:
        """Whether ranks agree on what they have loaded, in the next exchange."""
        return self._checkpointed.due

    @property
    def place(self) -> object:
        """What ranks must have in common, but their steps."""
        layout = self.layout
        kept = self._plan.step if any(bucket.replicated for bucket in layout.buckets) else 0
        return self._plan.generation, self.failures, layout.unsettled, self._checkpointed.due, kept

    def go_to(self, step: int, rounds: int, state_due: bool) -> None:
        """As all ranks do."""
        self._plan.step, self._checkpointed.due = step, state_due
