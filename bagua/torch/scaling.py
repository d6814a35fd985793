"""A `GradScaler` where gradients are each rank's own: what may be used, and do scales differ?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp
from bagua.common.numpy_ops import allreduce
from bagua.common.process_set import ProcessSet
from bagua.torch import safety

_LEFT = ("found_inf", "grad_scale")  # attributes in which it tells an optimizer


class Scaling:
    """Of one optimizer on this rank."""

    def __init__(self) -> None:
        # Both on their device until they are compared. A checksum of the steps that had one, since
        # equal scales that shrank at different steps grow at different steps, and the last scale.
        self._overflows: Any = 0
        self._scale: Any = None

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
        if overflow is not None:
            # Of powers, so that hardly two sums are the same.
            self._overflows = self._overflows + (overflow > 0).long() * pow(3, step, 2**61 - 1)
            self._scale = scale
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

    def refuse_different(
        self, name: str, process_set: ProcessSet, told: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Where each rank unscales by itself, each has a scale of its own in time.

        What is known of them stays, also after an error, so that the next look has the same answer.
        """
        scale = None if self._scale is None else float(self._scale)
        mine = safety.sample_of(f"{int(self._overflows)} {scale}")
        greatest = allreduce(mine, name=name, op=ReduceOp.Max, process_set=process_set)
        if not safety.samples_differ(greatest):
            return
        for optimizer in told:  # which a GradScaler whose call of `step()` ends here does not clear
            for left in _LEFT:
                vars(optimizer).pop(left, None)
        raise UsageError(
            "GradScalers of the ranks differ, in their scales or in the steps that overflowed, and "
            "gradients are averaged with one: make a new GradScaler on every rank, tell the "
            "optimizer so by forget_scaler(), and go on"
        )
