"""Whose the gradients of one step are, and whether somebody has zeroed those of the last one.

Averages may be averaged again, and nothing is lost. What is summed or kept twice is another number,
so where gradients are no plain averages it is an error to add to what ranks have exchanged.
"""

from __future__ import annotations

import torch

from bagua.common.errors import UsageError
from bagua.torch import safety
from bagua.torch.layout import Layout


class Sharing:
    """See the module."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.exchanges = 0  # since the last step
        self.done = False  # whether the last pass has been exchanged since then
        self.has_own = False  # gradients that no exchange has seen
        self._left = False  # those of the last step may still be there
        self._looked = False  # whether they are
        self._added_to = ""  # one of those that was

    @property
    def complete(self) -> bool:
        """Whether what there is, is everybody's."""
        return self.done and not self.has_own

    def exchanged(self, earlier: int | None) -> None:
        """Everything, by buckets that had been exchanged so often before in this step."""
        self.exchanges = 1 + (self.exchanges if earlier is None else earlier)
        self.done, self.has_own = True, False

    def zeroed(self) -> None:
        self._begin(left=False)

    def stepped(self) -> None:
        self._begin(left=True)

    def _begin(self, left: bool) -> None:
        self.exchanges, self.done, self.has_own, self._left = 0, False, False, left
        self._added_to = ""

    def is_zeroed(self, fresh: torch.Tensor) -> bool:
        """Notices a zero_grad of somebody else's, as of the model or of an optimizer unknown to us.

        Every parameter has a gradient after an exchange, and only the fresh one when all others'
        were taken. Zeros tell nothing: a gradient may be zero.
        """
        if not self.done or not self._layout.sums_again():
            return False
        others = [param for param in self._layout.slots if param is not fresh]
        return bool(others) and all(param.grad is None for param in others)

    def check(self, fresh: torch.Tensor) -> None:
        """A backward pass begins with this gradient: what it adds to must not be everybody's."""
        if not (self.done or self._left) or not self._layout.sums_again():
            return
        if self.done:
            raise UsageError(
                "backward ran twice before step(), on top of gradients that ranks have "
                "exchanged and that are no plain averages; use backward_passes_per_step, "
                "no_sync() or zero_grad()"
            )
        if not self._looked:
            self._look_for_those_of_the_last_step(fresh)

    def _look_for_those_of_the_last_step(self, fresh: torch.Tensor) -> None:
        """Once, since that waits for a device: a program zeroes in all its steps, or in none.

        It may do so yet: as a GAN does, whose generator's loss goes through a discriminator.
        """
        self._looked = True
        for name, param in self._layout.named():
            grad = None if param is fresh else param.grad
            if grad is not None and not safety.begins_with_zeros(grad):
                self._added_to = name
                return

    def check_step(self) -> None:
        """Gradients are about to be used."""
        if self._added_to:
            raise UsageError(
                f"the gradient of {self._added_to} still has that of the last step in it, which "
                "ranks had exchanged and which is no plain average: call zero_grad() after step()"
            )
