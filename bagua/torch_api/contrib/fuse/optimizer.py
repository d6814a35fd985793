"""`fuse_optimizer`: one call for all parameters of a group, in place of some for each.

Nothing is copied into one tensor for that: torch has kernels that take a list of parameters. They
are chosen as torch's own arguments choose them, `fused=True` and `foreach=True`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from bagua.common.errors import UsageError
from bagua.common.warn import warn
from bagua.torch import DistributedOptimizer

_log = logging.getLogger("bagua")
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_Group = dict[str, Any]

# Without a kernel of their own `foreach` runs one operation after the other over all parameters. On
# CPUs that saves calls, but what is larger leaves the cache in between and takes up to twice as
# long. Elements of a parameter, on average.
_SMALL = 4096
_NEVER_FASTER = (torch.optim.ASGD, torch.optim.Rprop)  # at any size, on CPUs

_FUSED = "bagua_fused"  # of the optimizer's attribute


def fuse_optimizer(optimizer: _Optimizer, do_flatten: bool = True) -> _Optimizer:
    """Makes the optimizer step all parameters together; returns it.

    `step()` and `fuse_step()` are the same afterwards. Results are those of before but for the
    rounding of single operations. `state_dict()` has the same entries, and loading one leaves the
    optimizer fused. What is wrapped in a `DistributedOptimizer` or given to `with_bagua` may be
    fused before or after. SGD and Adagrad take no sparse gradients then.

    Where nothing would be faster, which a warning tells, everything stays as it is.

    Args:
        optimizer: one of torch.optim, or a subclass that keeps its `step`.
        do_flatten: there for Bagua's sake; parameters stay where they are in any case.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = fuse_optimizer(torch.optim.SGD([weight], lr=0.5))
    >>> weight.grad = torch.ones(2)
    >>> optimizer.fuse_step()
    >>> weight.tolist()
    [0.5, 0.5]
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"fuse_optimizer takes an optimizer, not {type(optimizer).__name__}")
    inner = optimizer.inner if isinstance(optimizer, DistributedOptimizer) else optimizer
    flags = [_fuse(inner, group) for group in inner.param_groups]
    if not any(flags):
        warn(
            f"{type(inner).__name__} steps one parameter after the other as before: torch has "
            "nothing faster for these",
        )
    _log.info("%s steps groups by %s", type(inner).__name__, [flag or "loop" for flag in flags])
    if len(set(flags)) == 1 and flags[0]:
        inner.defaults[flags[0]] = True  # of groups that are added later
    if not hasattr(inner, _FUSED):
        inner.register_load_state_dict_post_hook(_fuse_all)
    setattr(inner, _FUSED, any(flags))
    inner.fuse_step = _step_of(inner)  # type: ignore[attr-defined]
    return optimizer


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `fuse_optimizer` has made it faster."""
    return bool(getattr(optimizer, _FUSED, False))


def _fuse_all(optimizer: torch.optim.Optimizer) -> None:
    """A state that was loaded has brought its own flags."""
    for group in optimizer.param_groups:
        _fuse(optimizer, group)


def _fuse(optimizer: torch.optim.Optimizer, group: _Group) -> str:
    """Sets the flag of the fastest way there is, and returns its name, or an empty one."""
    params = group["params"]
    kinds = {(param.device.type, param.dtype) for param in params}
    torchs = next(
        (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim.")),
        torch.optim.Optimizer,
    )
    if not params or group.get("differentiable") or not _steps_as(optimizer, torchs):
        return ""
    if "fused" in group and all(_runs(torchs, "fused", *kind) for kind in kinds):
        group["fused"], group["foreach"] = True, False
        for param in params:
            # What has stepped before has it where the slower way wants it.
            state = optimizer.state.get(param, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(param.device, torch.float32)
        return "fused"
    on_cpu = any(param.is_cpu for param in params)
    small = sum(param.numel() for param in params) <= _SMALL * len(params)
    pays = not on_cpu or (small and torchs not in _NEVER_FASTER)
    if "foreach" in group and pays and all(_runs(torchs, "foreach", *kind) for kind in kinds):
        group["foreach"] = True
        return "foreach"
    return ""


def _steps_as(optimizer: torch.optim.Optimizer, torchs: type[torch.optim.Optimizer]) -> bool:
    """A step of a subclass's own may know nothing of flags. Torch wraps what it finds, in place."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(torchs.step)


@functools.cache
def _runs(kind: Any, flag: str, device: str, dtype: torch.dtype) -> bool:
    """Whether this torch can."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
    param.grad = torch.zeros_like(param)
    try:
        kind([param], **{flag: True}).step()
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Calls `step`, also one that a scheduler has replaced; does not keep the optimizer alive."""
    reference = weakref.ref(optimizer)

    def fuse_step(closure: Callable[[], Any] | None = None) -> Any:
        alive = reference()
        return alive.step(closure) if alive is not None else None

    return fuse_step
