"""How the replicas of an optimizer communicate: by which algorithm, from which step on, and what it
keeps; how they change to another one, and meet where ranks have joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bagua.algorithms import Algorithm
from bagua.algorithms.answers import at_step
from bagua.common.errors import UsageError
from bagua.common.process_set import ProcessSet, checked
from bagua.common.together import together
from bagua.common.world import world
from bagua.torch import capture, choice, kept, safety
from bagua.torch.agreement import changing_to, check_algorithm, check_change, check_progress
from bagua.torch.background import Background
from bagua.torch.between_steps import BetweenSteps
from bagua.torch.checks import check_own
from bagua.torch.choice import Choice
from bagua.torch.driver import Driver
from bagua.torch.gradients import Gradients
from bagua.torch.mixing import Mixing
from bagua.torch.names import Names, checked_names
from bagua.torch.outer import Outer
from bagua.torch.scaling import Scaling
from bagua.torch.standing import Standing, in_one_piece
from bagua.torch.wrapped import Wrapped

NamedParameters = Iterable[tuple[str, torch.Tensor]]
Progress = tuple[int, int, int]
Place = tuple[Progress, str]


class Replicated(Wrapped):
    """See the module; optimizer.py has what users call while they train."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: NamedParameters | None,
        of_gradients: dict[str, Any],
        passes: int,
        process_set: ProcessSet,
        algorithm: Choice | None,
    ) -> None:
        super().__init__(optimizer)
        self._names = Names()
        self._process_set = checked(process_set)
        self._of_gradients = of_gradients
        self._passes = passes
        self._step = 0
        self._since = 0  # the step from which the algorithm counts
        # Whether ranks must see that they go on from the same one: at first, and after loading.
        self._progress_due = True
        self._resting = False  # nothing is begun in the background
        self._scaling = Scaling()
        self._loaded: dict[str, Any] | None = None  # of an algorithm that comes with the next step
        self._standing = Standing(process_set)
        self._replicas = safety.Replicas()
        chosen = algorithm or world().config.algorithm
        self._algorithm, _ = self._checked(chosen, True, named_parameters)
        if algorithm is not None:
            choice.tell_what_is_overruled(algorithm, self._algorithm, self._process_set)
        choice.tell_what_is_exact(self._algorithm, self._process_set)
        self._driver: Driver = self._driver_of(at_step(self._algorithm, 0))
        self._driver.passes_per_step = passes
        self._tell_what_is_used()

    @property
    def algorithm(self) -> Algorithm:
        return self._algorithm

    @in_one_piece
    def set_algorithm(self, algorithm: Choice) -> None:
        """Goes on with another algorithm, from the next step; every rank calls it at the same one.

        Where replicas had been different, all end with their exact average first.
        """
        self.go_on_with(*self.agreed(algorithm))

    # Its two halves. Where several optimizers change, all have agreed before any goes on.

    @in_one_piece
    def agreed(self, algorithm: Choice) -> tuple[Algorithm, int]:
        """What `go_on_with` takes. That it cannot is an error on all ranks, and changes nothing."""
        self._catch_up()
        self._standing.check()
        with changing_to(algorithm):
            wanted, steps = self._checked(algorithm, not self._driver.alone)
            self._compare_scalers(at_step(wanted, 0))
        return wanted, steps

    @in_one_piece
    def go_on_with(self, wanted: Algorithm, steps: int) -> None:
        before = self._algorithm, self._step, self._since, self._resting
        self._step = self._since + steps  # where each rank had gone at its own pace
        self._algorithm, self._since, self._resting = wanted, self._step, False
        try:
            self._catch_up(chosen=True)
        except BaseException:
            self._algorithm, self._step, self._since, self._resting = before
            raise
        self._replicas.go_to(self._step)
        choice.tell_what_is_exact(self._algorithm, self._process_set)

    @in_one_piece
    def settle(self) -> None:
        """All ranks end with one exact average of weights, where the algorithm lets them differ.

        Call it on every rank: after training, or before a checkpoint that one of them writes.
        """
        self._driver.settle()

    def pause(self) -> None:
        """Begins no more exchanges in the background, until `resume()`."""
        self._rest(True)

    def resume(self) -> None:
        self._rest(False)

    @in_one_piece
    def consensus_distance(self) -> float:
        """How far weights of the ranks are from their mean, relative to it; every rank calls it."""
        name = self._standing.name("consensus")
        return safety.consensus_distance(self._driver.named(), name, self._process_set)

    def at_rest(self) -> bool:
        """Whether nothing is under way."""
        return self._driver.at_rest()

    def withdraw(self, problem: str) -> None:
        """This rank has come no further in the middle of a step: the others hear so."""
        self._standing.withdraw(problem)
        self._driver.withdraw(problem)

    def _rest(self, resting: bool) -> None:
        if self._algorithm.when != "background" and not self._driver.alone:
            raise UsageError(f"{self._algorithm!r} has nothing in the background to pause")
        self._resting = resting  # also if it is to begin only after a warm-up
        self._driver.resting = resting

    def _checked(
        self, algorithm: Choice, in_step: bool, named: NamedParameters | None = None
    ) -> tuple[Algorithm, int]:
        """It, and after how many steps with the one before all ranks go on with it."""
        name, group = self._standing.name, self._process_set
        with together("what is chosen", name("chosen"), group):
            names = self._names = self._names or checked_names(self.inner, named)
            found = choice.resolved(algorithm, self.inner)
            found = choice.with_codec(found, self._of_gradients["compression"])
        steps = self._step - self._since
        settings = {**self._of_gradients, "backward_passes_per_step": self._passes}
        steps = check_algorithm(found, steps, in_step, settings, names, name("algorithm"), group)
        choice.tell_what_matches_nothing(found, names.values(), group)
        op: Any = self._of_gradients["op"]
        check_own([(of, param) for param, of in names.items()], found, op, name("own"), group)
        return found, steps

    def _driver_of(self, algorithm: Algorithm) -> Driver:
        if algorithm.what in ("grad", "momentum"):
            return Gradients(
                self.inner,
                self._names,
                standing=self._standing,
                algorithm=algorithm,
                step=self._step,
                **self._of_gradients,
            )
        kind: type[BetweenSteps] = Outer if algorithm.what == "delta" else Mixing
        if algorithm.when == "background":
            kind = Background
        driver = kind(self.inner, self._names, algorithm, self._standing, self._step)
        driver.resting = self._resting
        return driver

    def _catch_up(self, chosen: bool = False) -> None:
        """Changes to the algorithm of this step. All ranks have `chosen` it, or at() says so."""
        if self._progress_due and not self._standing.withdrawn:
            self._compare_progress()
        now, wanted = self._driver, at_step(self._algorithm, self._step - self._since)
        alone = self._process_set.size() == 1 and not self._standing.retired
        if self._standing.withdrawn and alone:
            self._standing = Standing(self._process_set)
            return self._change_to(wanted)  # nobody else is in the middle of anything
        if wanted == now.algorithm or self._standing.withdrawn:
            return
        capture.refuse("from here on it is %r; take some steps before", wanted)
        with changing_to(wanted):
            self._go_over(wanted, chosen)
        if self._loaded is not None:
            self._driver.load_state(self._loaded, self._step)
            self._loaded = None

    def _compare_progress(self) -> None:
        """Before any goes by it, where an algorithm does."""
        if self._algorithm.changes or not self._driver.shares_gradients:
            capture.refuse("ranks compare first how far they are; take a step before")
            wanted = at_step(self._algorithm, self._step - self._since)
            mine = None if wanted.when == "background" else (self._step, self._since)
            check_progress(mine, self._standing.name("progress"), self._process_set)
        self._progress_due = False

    def _go_over(self, wanted: Algorithm, chosen: bool) -> None:
        now = self._driver
        if not chosen:
            apart = now.alone or wanted.when == "background"
            steps = None if apart else self._step - self._since
            name, names = self._standing.name("change_by_at"), self._names
            check_change(wanted, steps, names, name, self._process_set)
        self._compare_scalers(wanted)
        shares_steps = wanted.what in ("grad", "momentum")
        if isinstance(now, Gradients) and shares_steps:
            now.change(wanted)
            self._tell_what_is_used()
        else:
            if isinstance(now, BetweenSteps) and shares_steps:
                now.hand_over()
            else:
                now.settle()
            self._standing.make_room = now.close  # unless all stay what they were
            try:
                self._change_to(wanted)
            finally:
                self._standing.make_room = lambda: None

    def _change_to(self, algorithm: Algorithm) -> None:
        before, driver = self._driver, self._driver_of(algorithm)
        driver.passes_per_step, driver.paused = before.passes_per_step, before.paused
        self._driver = driver
        if algorithm != before.algorithm:
            self._tell_what_is_used()

    def _tell_what_is_used(self) -> None:
        by = f"{self._standing.prefix} ({type(self.inner).__name__})"
        choice.tell_what_is_used(self._driver.algorithm, by, self._step, self._process_set)

    def _compare_scalers(self, wanted: Algorithm) -> None:
        """Refuses those that differ where ranks are about to exchange gradients."""
        if wanted.what in ("grad", "momentum") and not self._driver.shares_gradients:
            name, told = self._standing.name("scalers"), (self, self.inner)
            self._scaling.refuse_different(name, self._process_set, told)

    # ---- state ---------------------------------------------------------------------------------

    def state_dict(self) -> Any:
        """The wrapped optimizer's, and what this rank's algorithm keeps from step to step."""
        return self.inner.state_dict() | self.own_state()

    def load_state_dict(self, state_dict: Any) -> None:
        """What an algorithm keeps is taken up in the next exchange, if every rank has its own."""
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != kept.KEY})
        self.load_own_state(state_dict)

    def own_state(self) -> dict[str, Any]:
        """What `state_dict()` has beside the wrapped optimizer's; may be empty."""
        kept_now = self._loaded
        if kept_now is None and not self._standing.withdrawn:
            kept_now = self._driver.state()
        counts = self._algorithm.changes or not self._driver.shares_gradients
        if kept_now is None and not counts:
            return {}
        apart = self._driver.alone
        own = {"step": self._step, "since": self._since, "kept": kept_now, "apart": apart}
        return {kept.KEY: own}

    def load_own_state(self, state_dict: Any) -> None:
        own = state_dict.get(kept.KEY) or {"step": self._step, "since": self._since, "kept": None}
        wanted = at_step(self._algorithm, own["step"] - own["since"])
        if own.get("apart") and wanted.when != "background":
            own = {"step": 0, "since": 0, "kept": None}  # ranks had taken unlike numbers of steps
            wanted = at_step(self._algorithm, 0)
        self._step, self._since, self._progress_due = own["step"], own["since"], True
        self._loaded = own["kept"] if wanted != self._driver.algorithm else None
        self._driver.load_state(None if self._loaded else own["kept"], self._step)

    @property
    def progress(self) -> Progress:
        """Steps so far, the step from which the algorithm counts, and exchanges of weights."""
        return self._step, self._since, self._driver.rounds

    @property
    def state_due(self) -> bool:
        """Whether this rank expects all to agree on what they have loaded."""
        return self._driver.state_due

    def go_to(self, progress: Progress, state_due: bool) -> None:
        """As all ranks do."""
        self._step, self._since, rounds = progress
        self._progress_due = False
        self._replicas.go_to(self._step)
        self._driver.go_to(self._step, rounds, state_due)

    def place(self, process_set: ProcessSet) -> tuple[int, Place] | None:
        """The number of this optimizer, and where this rank is with it; None if others have it."""
        elsewhere = self._process_set.process_set_id != process_set.process_set_id
        if elsewhere or self._standing.withdrawn:
            return None
        return self._standing.number, (self.progress, repr((self.algorithm, self._driver.place)))

    @in_one_piece
    def meet(self, places: Sequence[Place]) -> None:
        """By rank, after a join: all go on where the first one is, and agree anew if they must.

        Where each steps by itself they stay where they are.
        """
        progress = max(progress for progress, _ in places)
        self._progress_due = False
        if len({where for _, where in places}) == 1:
            return None if self._driver.alone else self.go_to(progress, self.state_due)
        self._driver.part()
        self._standing = Standing(self._process_set)
        self._step, self._since, _ = progress
        self._change_to(at_step(self._algorithm, self._step - self._since))
        self._replicas.go_to(self._step)
        first = [at for at, _ in places].index(progress)
        self._driver.begin_from(self._process_set.ranks[first])

    @in_one_piece
    def add_param_group(self, param_group: Any) -> None:
        self._catch_up()
        self._standing.check()
        self.inner.add_param_group(param_group)
        self._driver.refresh()
