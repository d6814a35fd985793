"""What does as an optimizer's algorithm says: gradients.py, or what between_steps.py begins."""

from __future__ import annotations

import abc
from typing import Any

import torch

from bagua.algorithms import Algorithm
from bagua.torch.standing import Standing


class Driver(abc.ABC):
    """All ranks have one of the same kind, at the same step unless each is `alone`."""

    shares_gradients = False  # before a step, and nothing else travels
    drifts = False  # whether replicas differ after every step, by design
    alone = False  # whether each rank steps by itself
    remembers = False  # whether an exchange of gradients depends on those before
    skips = False  # whether the wrapped optimizer must not step
    rounds = 0  # exchanges of weights so far
    resting = False  # nothing is begun in the background
    paused = False  # backward only accumulates
    passes_per_step = 1  # of which all but the last only accumulate
    algorithm: Algorithm
    standing: Standing

    @abc.abstractmethod
    def synchronize(self) -> None:
        """The optimizer is about to step."""

    @abc.abstractmethod
    def stepped(self) -> None:
        """The optimizer has stepped."""

    def zeroed(self) -> None:
        """Gradients are forgotten."""
        return

    @abc.abstractmethod
    def refresh(self) -> None:
        """Notices parameters that were added, frozen or thawed since the last look."""

    def look_again(self) -> None:
        """Notices whatever happened behind our back."""
        self.refresh()

    @abc.abstractmethod
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that are to be equal, or nearly so."""

    # ---- where replicas are, and how they come together ----------------------------------------

    @abc.abstractmethod
    def equal_now(self) -> bool:
        """Whether all replicas are."""

    @abc.abstractmethod
    def settle(self) -> None:
        """All ranks end with equal weights."""

    @property
    @abc.abstractmethod
    def place(self) -> object:
        """What ranks must have in common, but their steps and rounds."""

    @abc.abstractmethod
    def go_to(self, step: int, rounds: int, state_due: bool) -> None:
        """As all ranks do."""

    def begin_from(self, root: int) -> None:
        """Before the first step: with whose weights, where they are not equal."""
        return

    # ---- what is kept from step to step --------------------------------------------------------

    @abc.abstractmethod
    def state(self) -> dict[str, Any] | None:
        """As a checkpoint has it; None if there is nothing."""

    @abc.abstractmethod
    def load_state(self, loaded: dict[str, Any] | None, step: int) -> None:
        """It is taken up where all ranks are next."""

    @property
    @abc.abstractmethod
    def state_due(self) -> bool:
        """Whether ranks are going to agree on what they have loaded."""

    # ---- its end -------------------------------------------------------------------------------

    @abc.abstractmethod
    def at_rest(self) -> bool:
        """Whether nothing is under way."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the parameters alone, as they are."""

    def part(self) -> None:
        """The same where ranks have joined, and may not all be in the middle of the same."""
        self.close()

    @abc.abstractmethod
    def withdraw(self, problem: str) -> None:
        """In the middle of a step: this rank takes part in nothing more."""
