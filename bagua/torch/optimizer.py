"""`DistributedOptimizer`: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from bagua.algorithms import Algorithm
from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.common.world import world
from bagua.torch import kept
from bagua.torch.compression import Compression
from bagua.torch.gradients import Gradients

NamedParameters = Iterable[tuple[str, torch.Tensor]]


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: `backward()` leaves every rank with the same, averaged gradients.

    State, `param_groups`, `defaults` and hooks are the wrapped optimizer's own. Clip, unscale or
    look at gradients any time after `backward()`; no further ceremony is needed.

    Args:
        optimizer: the optimizer to wrap; it keeps its state.
        named_parameters: `model.named_parameters()`, for names in messages; optional.
        compression: `Compression.fp16` or `bf16` halve the bytes of fp32 gradients.
        backward_passes_per_step: gradients of so many passes are summed before the exchange.
        op: Average, Sum, Adasum, Min, Max or Product; Average if not given.
        gradient_predivide_factor: with Average, divide by it before the sum and the rest after.
        num_groups: exchange in so many buckets of about equally many parameters.
        groups: or in these: lists of parameters that are exchanged together.
        sparse_as_dense: turn sparse gradients into dense ones first.
        process_set: the ranks that train this model together.
        algorithm: how replicas communicate, by name or as an `Algorithm`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: NamedParameters | None = None,
        compression: Any = Compression.none,
        backward_passes_per_step: int = 1,
        op: ReduceOp | None = None,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        algorithm: str | Algorithm | None = None,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("this optimizer is distributed already")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"DistributedOptimizer wraps an optimizer, not {type(optimizer)}")
        if gradient_predivide_factor != 1.0 and op not in (None, ReduceOp.Average):
            raise UsageError("gradient_predivide_factor needs op=Average")
        if isinstance(groups, int):  # what num_groups was called later
            num_groups, groups = groups, None
        self.inner = optimizer
        self._skip_synchronize = False
        self._gradients = Gradients(
            optimizer,
            named_parameters,
            compression=compression,
            op=None if op is None else ReduceOp(op),
            scales=(1.0 / gradient_predivide_factor, gradient_predivide_factor),
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            algorithm=world().config.algorithm if algorithm is None else algorithm,
        )
        self.set_backward_passes_per_step(backward_passes_per_step)

    # ---- training ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the wrapped optimizer with gradients that all ranks share."""
        loss: Any
        if closure is not None:
            loss = self.inner.step(self._synchronized(closure))
        else:
            if not self._skip_synchronize:
                self._gradients.synchronize()
            loss = self.inner.step()
        self._gradients.stepped()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradients.look_again()
        self._gradients.zeroed()
        self.inner.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Makes sure that gradients are exchanged; after `backward()` they usually are."""
        self._gradients.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In it `step()` takes the gradients as they are."""
        self._skip_synchronize = True
        try:
            yield
        finally:
            self._skip_synchronize = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In it `backward()` only accumulates; the next one outside, or `step()`, exchanges."""
        before, self._gradients.paused = self._gradients.paused, True
        try:
            yield
        finally:
            self._gradients.paused = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        if int(passes) < 1:
            raise UsageError(f"backward_passes_per_step must be at least 1, not {passes}")
        self._gradients.passes_per_step = int(passes)

    def _synchronized(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._gradients.synchronize()
            return loss

        return evaluate

    # GradScaler would hand its scale to this object; so it unscales the gradients itself.
    _step_supports_amp_scaling = False

    # ---- what the wrapped optimizer is ---------------------------------------------------------

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> Any:
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.inner.defaults = defaults

    def state_dict(self) -> Any:
        """The wrapped optimizer's, and what this rank's algorithm keeps from step to step."""
        own = self._gradients.state()
        return self.inner.state_dict() | ({kept.KEY: own} if own else {})

    def load_state_dict(self, state_dict: Any) -> None:
        """What an algorithm keeps is taken up in the next exchange, if every rank has its own."""
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != kept.KEY})
        self._gradients.load_state(state_dict.get(kept.KEY))

    def add_param_group(self, param_group: Any) -> None:
        self.inner.add_param_group(param_group)
        self._gradients.refresh()

    def __getattr__(self, name: str) -> Any:
        # Only what neither this object nor torch.optim.Optimizer has gets here.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getstate__(self) -> Any:
        raise UsageError(
            "a DistributedOptimizer cannot be pickled or copied; save its state_dict() instead"
        )

    def __repr__(self) -> str:
        return f"Distributed{self.inner!r}"


# Hooks are registered on, and called by, the wrapped optimizer.
def _delegate(name: str) -> Callable[..., Any]:
    def call(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    call.__name__ = name
    return call


for _name in dir(torch.optim.Optimizer):
    if _name.startswith("register_"):
        setattr(DistributedOptimizer, _name, _delegate(_name))


def no_sync(optimizer: DistributedOptimizer) -> Any:
    """`optimizer.no_sync()`, as a function."""
    return optimizer.no_sync()
