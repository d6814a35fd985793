"""An optimizer that stands for another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bagua.common.errors import UsageError


def _of_inner(name: str) -> Any:
    return property(
        lambda self: getattr(self.inner, name),
        lambda self, value: setattr(self.inner, name, value),
    )


class Wrapped(torch.optim.Optimizer):
    """Its state, `param_groups`, `defaults` and hooks are those of `inner`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner  # torch's own constructor would make groups and state

    param_groups = _of_inner("param_groups")
    state = _of_inner("state")
    defaults = _of_inner("defaults")

    def __getattr__(self, name: str) -> Any:
        # Only what neither this object nor torch.optim.Optimizer has gets here.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getstate__(self) -> Any:
        raise UsageError(
            f"a {type(self).__name__} cannot be pickled or copied; save its state_dict() instead"
        )


# Hooks are registered on, and called by, the wrapped optimizer.
def _delegate(name: str) -> Callable[..., Any]:
    def call(self: Wrapped, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    call.__name__ = name
    return call


for _name in dir(torch.optim.Optimizer):
    if _name.startswith("register_"):
        setattr(Wrapped, _name, _delegate(_name))
