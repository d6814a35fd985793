"""Adam whose momentum can travel instead of gradients, once its variance is known well enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.torch.own import is_own

_LEAST_VARIANCE = 0.01  # by default, and in checkpoints that had no other


class QAdam(torch.optim.Optimizer):
    """Adam for `warmup_steps` steps; then its variance stays as it is, and only momentum moves.

    After the warm-up `grad` is momentum over the root of the variance, once backward has returned:
    gradients can neither be clipped nor unscaled there, so train without a `GradScaler`.

    In a `DistributedOptimizer(..., algorithm="qadam")` ranks average gradients during the warm-up,
    exactly, and momentum afterwards, through a codec. By itself it does the same on one rank.
    Parameters that are each rank's own are not exchanged, so Adam goes on for them.

    Args:
        params: parameters, or groups of them with betas and the like of their own.
        lr: learning rate.
        warmup_steps: steps in which the variance is estimated; at least 1.
        betas: how much of momentum and variance is kept from step to step.
        eps: added to the root of the variance.
        weight_decay: of weights, as part of the gradient.
        decoupled: instead multiply weights by 1 - lr * weight_decay, as AdamW does.
        least_variance: what a frozen variance counts as, at least, as a share of the mean of its
            tensor's. With 0, as in 1-bit Adam, a value that had next to no gradient in the warm-up
            is divided by next to nothing for ever.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        least_variance: float = _LEAST_VARIANCE,
    ) -> None:
        if warmup_steps < 1 or warmup_steps != int(warmup_steps):
            raise UsageError(f"warmup_steps is a number of steps, at least 1, not {warmup_steps}")
        self.warmup_steps = int(warmup_steps)
        self._folded: set[torch.Tensor] = set()  # their `grad` is momentum already
        # Of variances that are frozen, and which those were.
        self._roots: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor, int]] = {}
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "decoupled": decoupled,
                "least_variance": least_variance,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        rule = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay", "least_variance"):
            if not 0 <= rule[name] < math.inf:
                raise UsageError(f"{name} is a number from 0 on, not {rule[name]}")
        betas = rule["betas"]
        if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise UsageError(f"betas are two numbers from 0 to below 1, not {betas}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def fold_gradients(self, params: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        """Makes gradients, in these views, the momentum that this rank would go on with.

        Over the root of the variance, which is the same on all ranks: a codec's error is then as
        small as the step that it becomes a part of, also where gradients are tiny.
        """
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        for param, view in zip(params, views):
            group = group_of[param]
            state = self._state_of(param)
            # Steps that ranks have skipped, or in which it was frozen, are missing in its variance.
            if state["variance_steps"] == 0:
                raise UsageError(
                    f"a parameter of shape {tuple(param.shape)} had no step in the warm-up, so its "
                    "variance is not known; warm up longer, or give it an optimizer of its own"
                )
            root = self._frozen_root(param, group, view)
            momentum = self._decayed(param, view, group).lerp_(state["momentum"], group["betas"][0])
            momentum.div_(root)
            self._folded.add(param)

    @staticmethod
    def _decayed(
        param: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        if group["weight_decay"] and not group["decoupled"]:
            gradient.add_(param, alpha=group["weight_decay"])
        return gradient

    def _state_of(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(param)
            state["variance"] = torch.zeros_like(param)
        if "variance_steps" not in state:  # older checkpoints had taken all of the warm-up
            known = state["step"]
            state["variance_steps"] = known if is_own(param) else min(known, self.warmup_steps)
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._folded.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = [
            (param, group)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for param, _ in used:
            if param.grad.is_sparse:
                raise UsageError(
                    f"the gradient of a parameter of shape {tuple(param.shape)} is sparse, and "
                    "QAdam's momentum is not: use sparse_as_dense=True or an optimizer of its own"
                )
        for param, group in used:
            self._step(param, group)
        self._folded.clear()
        return loss

    def _step(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(param)
        beta, beta_of_variance = group["betas"]
        state["step"] += 1
        momentum = state["momentum"]
        if group["decoupled"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        rate = -group["lr"] / (1 - beta ** state["step"])
        if param in self._folded:
            momentum.copy_(param.grad).mul_(self._roots[param][0] if param in self._roots else 1)
            param.add_(param.grad, alpha=rate)  # type: ignore[arg-type]
            return
        gradient = self._decayed(param, param.grad.clone(), group)  # type: ignore[union-attr]
        momentum.lerp_(gradient, 1 - beta)
        if state["step"] > self.warmup_steps and not is_own(param):
            root = self._frozen_root(param, group, gradient)
        else:
            variance = state["variance"]
            variance.mul_(beta_of_variance)
            variance.addcmul_(gradient, gradient, value=1 - beta_of_variance)
            state["variance_steps"] += 1
            variance = variance / (1 - beta_of_variance ** state["variance_steps"])
            root = variance.sqrt_().add_(group["eps"])
        param.addcdiv_(momentum, root, value=rate)

    def _frozen_root(
        self, param: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor
    ) -> torch.Tensor:
        """What momentum is divided by after the warm-up.

        The variance of values which had next to no gradient tells nothing, and what a codec adds
        would move them far: see `least_variance`.
        """
        state = self.state[param]
        variance = frozen = state["variance"]
        if param in self._roots:
            root, of, version = self._roots[param]
            if of is frozen and version == frozen._version:
                return root
        if not variance.any():
            if gradient.any():
                raise UsageError(
                    f"a parameter of shape {tuple(param.shape)} had no gradient in the warm-up, so "
                    "its variance is not known; warm up longer, or give it an optimizer of its own"
                )
            self._roots.pop(param, None)
            return torch.ones_like(variance)  # there is nothing to divide
        variance = variance / (1 - group["betas"][1] ** state["variance_steps"])
        least = group.get("least_variance", _LEAST_VARIANCE)
        variance.clamp_(min=least * variance.mean())
        root = variance.sqrt_().add_(group["eps"])
        self._roots[param] = (root, frozen, frozen._version)
        return root
