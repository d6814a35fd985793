"""Which gradients of an optimizer are exchanged, and in which buckets."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bagua.common import numpy_ops
from bagua.common.core import core
from bagua.common.errors import InternalError, JoinedError, UsageError
from bagua.common.kinds import Kind, ReduceOp
from bagua.common.requests import refuse_quietly
from bagua.common.world import world
from bagua.torch import lost, moments, safety
from bagua.torch.agreement import check_hyperparameters, hyperparameters
from bagua.torch.bucket_plan import Plan
from bagua.torch.buckets import Bucket, Watch
from bagua.torch.checks import check_parameters, other_gradients
from bagua.torch.claims import claims
from bagua.torch.grouping import Grouping
from bagua.torch.loose import Loose
from bagua.torch.names import Names
from bagua.torch.own import is_own
from bagua.torch.slot import Slot

_FIRST = "first"  # what ranks agree on of parameters that no exchange has had yet


class Layout:
    """See the module. It follows what becomes of the parameters, and what ranks agree on."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        plan: Plan,
        loose: Loose,
        grouping: Grouping,
        sparse_as_dense: bool,
        decide: Callable[[torch.Tensor], None],
        watch: Watch | None,
    ) -> None:
        self.buckets: list[Bucket] = []
        self.slots: dict[torch.Tensor, Slot] = {}
        self.params: list[torch.Tensor] = []  # what refresh saw last
        # In which gradients came, until it has been learned.
        self.order: list[Slot] | None = [] if world().config.learn_bucket_order else None
        self.rebuild_due = False  # some slots have left their buckets
        self._optimizer = optimizer
        self._names = names
        self._plan = plan
        self._loose = loose
        self._grouping = grouping
        self._sparse_as_dense = sparse_as_dense
        self._decide = decide
        self._watch = watch
        self._required: list[bool] = []  # which of the parameters require a gradient
        self._hooks: dict[torch.Tensor, Any] = {}
        self._numbers = itertools.count()  # of slots
        self._fresh: dict[Slot, None] = {}  # those that no exchange has had yet

    def close(self) -> None:
        """Leaves the parameters alone, and their gradients as they are."""
        for bucket in self.buckets:
            bucket.take_back()
        hooks, self._hooks = self._hooks, {}
        for param, hook in hooks.items():
            hook.remove()
            claims.drop(param)

    def name_of(self, param: torch.Tensor) -> str:
        return self._names[param]

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [(self.name_of(param), param) for param in self.params if not is_own(param)]

    @property
    def by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots.values()}

    @property
    def runs(self) -> list[list[Slot]]:
        """The slots of each bucket."""
        return [bucket.slots for bucket in self.buckets]

    @property
    def settled(self) -> bool:
        return self.order is None and not self.rebuild_due and not self._fresh

    @property
    def averages(self) -> bool:
        """Whether exchanging once more what has been exchanged changes nothing."""
        return self._loose.averages and all(bucket.averages for bucket in self.buckets)

    def sums_again(self) -> bool:
        """Whether a gradient would be accumulated on top of an exchanged one that is no average."""
        return self._loose.sums_again() or any(bucket.sums_again() for bucket in self.buckets)

    @property
    def unsettled(self) -> object:
        """What ranks have yet to agree on."""
        return self.order is None, self.rebuild_due, sorted(slot.name for slot in self._fresh)

    def refresh(self, shared: bool) -> bool:
        """Notices parameters that were added, frozen or thawed, when gradients are `shared` or not.

        Whether any that was added has a gradient, on any rank.
        """
        lists = [group["params"] for group in self._optimizer.param_groups]
        # Twice a step, and a model may have thousands.
        if core.unchanged(lists, self.params, self._required):
            return False
        everything = [p for params in lists for p in params]
        wanted = [p for p in everything if p.requires_grad and not is_own(p)]
        gone = set(self._hooks).difference(wanted)
        stays = self._hooks.keys() - gone
        known = [slot for run in self.runs for slot in run if slot.param in stays]
        fresh = [(self.name_of(param), param) for param in wanted if param not in self._hooks]
        # If that is an error it is one the next time, too.
        named = [*((slot.name, slot.param) for slot in known), *fresh]
        name, group = f"{self._plan.prefix}.parameters", self._plan.process_set
        comes = any(param.grad is not None for _, param in fresh)
        try:
            comes = check_parameters(named, name, group, comes, other_gradients(named))
        except JoinedError as error:
            raise JoinedError(
                f"parameters were added, frozen or thawed, which all ranks compare: {error}; do so "
                "when join() has returned everywhere"
            ) from None
        self.params, self._required = everything, [p.requires_grad for p in everything]
        for param in gone:
            self._drop(param)
            if not (shared or param.requires_grad):
                param.grad = None  # or each rank would step it by its own
        # Gradients become ready from the last layer to the first.
        added = [Slot(name, param, next(self._numbers)) for name, param in fresh][::-1]
        for slot in added:
            self._add(slot)
        try:
            self.rebuild([known, added])
        except BaseException:
            self.params = []  # it is one the next time, too
            for slot in added:
                self._drop(slot.param)
            raise
        return comes

    def _add(self, slot: Slot) -> None:
        slot.notice = core.notice(self._decide)
        slot.made_dense = self._sparse_as_dense
        slot.may_be_sparse = not slot.made_dense
        self.slots[slot.param] = slot
        self._fresh[slot] = None
        if self._loose.wants_all:
            self._loose.add(slot)
        self._hooks[slot.param] = slot.param.register_post_accumulate_grad_hook(slot.notice)
        claims.add(slot.param)

    def _drop(self, param: torch.Tensor) -> None:
        self._hooks.pop(param).remove()
        claims.drop(param)
        slot = self.slots.pop(param)
        self._fresh.pop(slot, None)
        if slot.is_in_arena(param.grad) and not slot.view.any():
            param.grad = None  # the zeros of an exchange; a frozen parameter is not stepped
        self._loose.drop(param)

    def rebuild(self, runs: Sequence[Sequence[Slot]], exactly: bool = False) -> None:
        """Lays out buckets anew; `exactly`: a run is a bucket."""
        runs = [[slot for slot in run if not self._loose.has(slot.param)] for run in runs]
        if not exactly:
            runs = self._grouping.apply([slot for run in runs for slot in run]) or runs
        makes = self._plan.buckets(runs, cut=not (exactly or self._grouping))
        with self._plan.standing.laying_out("buckets"):
            self._move_to(makes)

    def _move_to(self, makes: Sequence[Callable[[], Bucket]]) -> None:
        before = self.runs
        views = {slot: slot.view for slots in before for slot in slots}
        in_arena = {slot for slot in views if slot.is_in_arena(slot.param.grad)}
        residuals = {slot: slot.residuals for slot in views}
        for slot in views:
            slot.leave()
        self._loose.plan_anew()
        self.buckets = [make() for make in makes]
        self._check_complete()
        for bucket in self.buckets:
            bucket.watch = self._watch
        lost.carry_over(residuals, self.buckets, before)
        for slot, view in views.items():
            if slot in in_arena and slot.param in self.slots:
                slot.view.copy_(view)
                slot.deliver()

    def _check_complete(self) -> None:
        """Replicas would differ silently where a gradient is in no bucket, or in two."""
        places = Counter(slot for run in self.runs for slot in run)
        places.update(slot for slot in self.slots.values() if self._loose.has(slot.param))
        for slot in {*self.slots.values(), *places}:
            if places[slot] != 1 or slot.param not in self.slots:
                raise InternalError(
                    f"{self._plan.prefix}: the gradient of {slot.name} is exchanged "
                    f"{places[slot]} times in a step instead of once"
                )

    def rebuild_as(self, names: Sequence[Sequence[str]]) -> None:
        """With these parameters in each bucket; those that travelled alone then get their own.

        Whether they do so again is not known before their first exchange.
        """
        rest = dict(sorted(self.by_name.items(), key=lambda item: item[1].number))
        runs = [[rest.pop(name) for name in run] for run in names]
        self.rebuild([*runs, *([slot] for slot in rest.values())], exactly=True)

    def improve(self) -> None:
        """Between two steps: makes use of what the last one has shown."""
        if self.order is not None:
            self._learn_order()
        elif self.rebuild_due:
            self.rebuild([[slot for run in self.runs for slot in run]])
        self.rebuild_due = False

    # The next two agree by sums, which also a rank that has joined takes part in.

    def _learn_order(self) -> None:
        """Lays the buckets out anew in the order in which the first rank's gradients came."""
        order = self.order or []
        slots = list(self.slots.values())
        places = np.zeros(len(slots), np.int64)
        if self._plan.process_set.rank() == 0:
            place = {slot: number for number, slot in enumerate(dict.fromkeys(order), 1)}
            places[:] = [place.get(slot, len(slots) + 1) for slot in slots]
        places = self._agreed("order", places, ReduceOp.Sum)  # after an error the next step asks
        self.order = None
        learned = [slots[i] for i in np.argsort(places, kind="stable")]
        current = [slot for run in self.runs for slot in run]
        if self.rebuild_due or (places.any() and learned != current):
            self.rebuild([learned])

    def agree_at_first(self) -> None:
        """In the first exchange of parameters the ranks agree which have sparse gradients.

        And hear if their weights are not the same.
        """
        if not self._fresh:
            return
        slots = sorted(self._fresh, key=lambda slot: slot.number)
        grads = [slot.dense_gradient() for slot in slots]
        sparse = np.array([grad is not None and grad.is_sparse for grad in grads], np.uint8)
        state = self._optimizer.state
        replicas = [(slot.name, slot.param) for slot in slots]
        replicas += [(f"the state of {s.name}", moments.sample(state.get(s.param))) for s in slots]
        of_rules = safety.sample_of(repr(hyperparameters(self._optimizer)))
        samples = np.concatenate([of_rules, safety.sample(replicas)])
        everyones = self._agreed(_FIRST, np.concatenate([samples, sparse]), ReduceOp.Max)
        rules, sample, agreed = np.split(everyones, [samples.size // 2, samples.size])
        # If one of these is an error it is one the next time, too.
        if safety.samples_differ(rules):
            name, group = f"{self._plan.prefix}.rules", self._plan.process_set
            check_hyperparameters(self._optimizer, self._plan.algorithm, name, group)
        moves = self._plan.fold is not None or self._plan.algorithm.momentum_correction
        if agreed.any() and moves:
            name = slots[int(agreed.argmax())].name
            raise UsageError(
                f"the gradient of {name} is sparse, and momentum is not: use sparse_as_dense=True "
                "or an optimizer of its own for it"
            )
        self._fresh = {}
        for slot, is_sparse in zip(slots, agreed):
            slot.may_be_sparse = bool(is_sparse)
            if is_sparse:
                self._loose.add(slot)
        self.rebuild_due = self.rebuild_due or bool(agreed.any())
        if safety.samples_differ(sample):
            prefix = f"{self._plan.prefix}.replicas"
            safety.warn_of_difference(replicas, prefix, self._plan.process_set)

    def refuse(self, problem: str) -> None:
        """Other ranks that come to `agree_at_first` hear why this one does not."""
        if self._fresh:
            refuse_quietly(Kind.ALLREDUCE, self._name(_FIRST), self._plan.process_set, problem)

    def _name(self, what: str) -> str:
        return f"{self._plan.prefix}.{what}"

    def _agreed(self, what: str, values: Any, op: ReduceOp) -> Any:
        name = self._name(what)
        return numpy_ops.allreduce(values, name=name, op=op, process_set=self._plan.process_set)
