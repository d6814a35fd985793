"""An optimizer that stays the user's own object, and exchanges when it is called.

A `DistributedOptimizer` acts in its own `step` and `zero_grad`. Here the user goes on calling the
optimizer inside it, so an attachment does the same in hooks of that one. Hooks refer to the
attachment weakly: it lives as long as the models that it was made for.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua.algorithms import Algorithm
from bagua.common.process_set import ProcessSet
from bagua.torch import DistributedOptimizer

_NAME = "bagua_attachment"  # of the optimizer's attribute
_UNSCALES = "_step_supports_amp_scaling"  # torch's
_METHODS = ("settle", "forget_scaler")  # that the user's optimizer gets


class Attachment:
    """What makes `optimizer` exchange, once it is attached; goes with its last reference."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Iterable[tuple[str, torch.Tensor]],
        algorithm: Algorithm,
        process_set: ProcessSet,
    ) -> None:
        self._hooks: list[Any] = []
        self.process_set = process_set
        self.distributed = DistributedOptimizer(
            optimizer, names, algorithm=algorithm, process_set=process_set
        )
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._saves = True

    def attach(self) -> None:
        """Takes the place of one that the optimizer had, which has to be gone."""
        optimizer = self.distributed.inner
        self._hooks = [
            optimizer.register_step_pre_hook(_weakly(self._before_step)),
            optimizer.register_step_post_hook(_weakly(self._after_step)),
            optimizer.register_state_dict_post_hook(_weakly(self._saved)),
            optimizer.register_load_state_dict_pre_hook(_weakly(self._loaded)),
        ]
        setattr(optimizer, _NAME, weakref.ref(self))
        self._unscales = not getattr(optimizer, _UNSCALES, False)  # it does not do so by itself
        setattr(optimizer, _UNSCALES, _Answer(_weakly(self._asked_to_unscale)))
        # There are no hooks for zero_grad.
        optimizer.zero_grad = _weakly(self._zero_grad)  # type: ignore[method-assign]
        for name in _METHODS:
            setattr(optimizer, name, _weakly(getattr(self.distributed, name)))

    def __del__(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            own = vars(self.distributed.inner)
            for name in ("zero_grad", *_METHODS, _UNSCALES):  # the class has a zero_grad
                own.pop(name, None)
            if not self._unscales:
                own[_UNSCALES] = True

    def switch(self, algorithm: Algorithm, steps: int) -> None:
        """Goes on with what was agreed, which may be the same one; all ranks are equal now."""
        self.distributed.settle()
        self.distributed.go_on_with(algorithm, steps)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Exchanges, or lets the closure do it each time it is evaluated."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.distributed.synchronize()
            finite = self.distributed.unscaled(optimizer, alone=not self._unscales)
            if self.distributed.skips or not finite:
                self._hide_gradients()
            return None

        evaluate = self.distributed.synchronized(closure)
        if len(args) > 1:
            return (args[0], evaluate, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate}

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for param, grad in self._hidden:
            param.grad = grad
        self._hidden = []
        self.distributed.stepped()

    def _asked_to_unscale(self) -> bool:
        """A GradScaler calls `step` of what unscales by itself even after an overflow."""
        return getattr(self.distributed, _UNSCALES) or not self._unscales

    def _hide_gradients(self) -> None:
        """A hook cannot call a step off; but parameters without a gradient are left alone."""
        params = [p for group in self.distributed.param_groups for p in group["params"]]
        self._hidden = [(param, param.grad) for param in params]
        for param in params:
            param.grad = None

    def _zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.distributed.zeroed()
        inner = self.distributed.inner
        type(inner).zero_grad(inner, *args, **kwargs)

    def _saved(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        return state_dict | self.distributed.own_state() if self._saves else None

    def _loaded(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        if self._saves:
            self.distributed.load_own_state(state_dict)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """In it the optimizer's state_dict is only what the optimizer itself has."""
        self._saves = False
        try:
            yield
        finally:
            self._saves = True


def attachment_of(optimizer: torch.optim.Optimizer) -> Attachment | None:
    """What was made for this optimizer before, if it is still there."""
    reference = getattr(optimizer, _NAME, None)
    return reference() if reference else None


class _Answer:
    """To what a GradScaler asks of an attribute, found when it asks."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask

    def __bool__(self) -> bool:
        return bool(self._ask())


class AnyOptimizer(torch.optim.Optimizer):
    """Stands for whichever optimizers step these parameters, where nobody says which."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {})
        self._ids = {id(param) for group in self.param_groups for param in group["params"]}

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            groups = optimizer.param_groups
            if any(id(param) in self._ids for group in groups for param in group["params"]):
                hook(optimizer, args, kwargs)

        return register_optimizer_step_post_hook(call)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        return alive(*args, **kwargs) if alive else None

    return call
