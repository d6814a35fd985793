"""A `GradScaler` where gradients are each rank's own: what may be used, and do scales differ?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.common.process_set import ProcessSet
from bagua.torch import safety

_LEFT = ("found_inf", "grad_scale")  # attributes in which it tells an optimizer


class Scaling:
    """Of one optimizer on this rank."""

    def __init__(self) -> None:
        self._overflows: Any = 0.0  # the sum of squares of the steps that had one

    def unscaled(
        self,
        told: torch.optim.Optimizer,
        params: Iterable[torch.Tensor],
        step: int,
        alone: bool = False,
    ) -> bool:
        """Undoes what a GradScaler has left in this object; whether gradients can be used.

        An optimizer that does both alone is let do it.
        """
        overflow, scale = (vars(told).get(name) for name in _LEFT)
        if overflow is not None:  # on its device, where nobody waits for it
            self._overflows = self._overflows + (overflow > 0).double() * (step + 1) ** 2
        if alone:
            return True
        overflown = overflow is not None and bool(overflow)
        self.forget(told)
        if scale is not None and not overflown:
            for param in params:
                if param.grad is not None:
                    param.grad.div_(scale.to(param.grad.device))
        return not overflown

    def forget(self, told: torch.optim.Optimizer) -> bool:
        """Lets nobody else use what it has left here; whether it has."""
        left = any(vars(told).get(name) is not None for name in _LEFT)
        for name in vars(told).keys() & set(_LEFT):
            setattr(told, name, None)
        return left

    def refuse_different(self, name: str, process_set: ProcessSet) -> None:
        """Where each rank unscales by itself, each has a scale of its own in time."""
        overflows, self._overflows = float(self._overflows), 0.0
        if not safety.alike(overflows, name, process_set):
            raise UsageError(
                "GradScalers of the ranks have had overflows at different steps, so their scales "
                "differ, and gradients are averaged with one: make a new GradScaler on every rank, "
                "and choose the algorithm again"
            )
