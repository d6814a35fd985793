"""`DistributedOptimizer`: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bagua.common import joined
from bagua.common.errors import UsageError
from bagua.common.kinds import Average, ReduceOp
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.common.requests import reduce_op
from bagua.common.warn import warn
from bagua.torch import alone, capture, ops
from bagua.torch.checks import check_predivide, checked_passes
from bagua.torch.choice import Choice
from bagua.torch.compression import Compression
from bagua.torch.compression import checked as compressor
from bagua.torch.grouping import checked_groups
from bagua.torch.replicated import NamedParameters, Replicated
from bagua.torch.scaling import Scaling
from bagua.torch.standing import around_users_code, in_one_piece

# By what they wrap, the latest one.
_wrappers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()


class DistributedOptimizer(Replicated):
    """Wraps an optimizer: `backward()` leaves every rank with the same, averaged gradients.

    State, `param_groups`, `defaults` and hooks are the wrapped optimizer's own. Clip, unscale or
    look at gradients any time after `backward()`; no further ceremony is needed. But after a pass
    that only accumulates they are still this rank's: call `synchronize()` before, as where the last
    step of an epoch has fewer passes. (After the warm-up of `qadam` they are its momentum: leave
    them as they are.)

    Args:
        optimizer: the optimizer to wrap; it keeps its state.
        named_parameters: `model.named_parameters()`, for names in messages; optional.
        compression: `Compression.fp16` or `bf16` halve the bytes of fp32 gradients; other codecs
            are those of algorithms, where they have more to choose from.
        backward_passes_per_step: gradients of so many passes are summed before the exchange.
        op: Average, Sum, Adasum, Min, Max or Product; Average if not given.
        gradient_predivide_factor: with Average, divide by it before the sum and the rest after.
        num_groups: exchange in so many buckets of about equally many parameters.
        groups: or in these: lists of parameters that are exchanged together.
        sparse_as_dense: turn sparse gradients into dense ones first.
        process_set: the ranks that train this model together.
        algorithm: how replicas communicate: by name, as an `Algorithm`, or as a dict from patterns
            of parameters' names to either.
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
        algorithm: Choice | None = None,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("this optimizer is distributed already")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"DistributedOptimizer wraps an optimizer, not {type(optimizer)}")
        op = None if op is None else reduce_op(op)
        check_predivide(gradient_predivide_factor, op)
        num_groups, groups = checked_groups(num_groups, groups)
        alone.somebody_wrapped()
        of_gradients = {
            "compression": compressor(compression, ("compress", "custom", "wire_dtype")),
            "op": op,
            "scales": (1.0 / gradient_predivide_factor, gradient_predivide_factor),
            "num_groups": num_groups,
            "groups": groups,
            "sparse_as_dense": sparse_as_dense,
        }
        passes = checked_passes(backward_passes_per_step)
        super().__init__(optimizer, named_parameters, of_gradients, passes, process_set, algorithm)
        self._skip_synchronize = False
        self._take_over()
        joined.note(self)

    def _take_over(self) -> None:
        """From who wrapped the same optimizer before, and may be kept, as by an error it raised.

        On other ranks it may not be there any more: nothing must exchange in its name.
        """
        before = _wrappers.get(self.inner, lambda: None)()
        if before is not None:
            before._standing.retire()
            if before._driver.shares_gradients:  # what else is under way may wait for ever
                before._driver.close()
        _wrappers[self.inner] = weakref.ref(self)

    # ---- training ------------------------------------------------------------------------------

    @around_users_code
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the wrapped optimizer with gradients that all ranks share."""
        loss: Any = None
        if closure is not None:
            loss = self.inner.step(self.synchronized(closure))
        else:
            if not (self._skip_synchronize and self._driver.shares_gradients):
                self.synchronize()
            usable = self.unscaled(self)  # an overflow counts, also where gradients are left out
            if usable and not self.skips:
                loss = self.inner.step()
        self.stepped()
        return loss

    def fuse_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`step`, by the name it also has where the wrapped optimizer is fused."""
        return self.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed()
        self.inner.zero_grad(set_to_none)

    # Whoever calls the wrapped optimizer in place of this one calls `synchronize` before its step,
    # or gives it a `synchronized` closure, and these two after its step and before its zero_grad.

    @in_one_piece
    def stepped(self) -> None:
        """The wrapped optimizer has stepped."""
        self._step += 1  # also if the exchange after it fails
        self._driver.stepped()
        self._catch_up()
        self._replicas.look(self._step, self._driver, self._standing)

    @in_one_piece
    def zeroed(self) -> None:
        """Gradients are to be forgotten."""
        self._catch_up()
        self._driver.look_again()
        self._driver.zeroed()

    @property
    def skips(self) -> bool:
        """Whether the wrapped optimizer must not step, since gradients are no numbers."""
        return self._driver.skips

    @in_one_piece
    def synchronize(self) -> None:
        """Makes sure that gradients are exchanged; after `backward()` they usually are."""
        self._catch_up()
        if self._algorithm.changes:
            capture.refuse("%r counts its steps on the host", self._algorithm)
        self._driver.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In it `step()` takes the gradients as they are; where weights travel, these still do."""
        self._skip_synchronize = True
        try:
            yield
        finally:
            self._skip_synchronize = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In it `backward()` only accumulates; the next one outside, or `step()`, exchanges."""
        before, self._driver.paused = self._driver.paused, True
        try:
            yield
        finally:
            self._driver.paused = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._driver.passes_per_step = self._passes = checked_passes(passes)

    def synchronized(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """What evaluates the model and exchanges its gradients, each time it is called."""
        times = itertools.count()

        def evaluate() -> Any:
            if next(times) == 1 and self._driver.remembers:
                warn(
                    f"{type(self.inner).__name__} evaluates more than once in a step, and with "
                    f"{self._algorithm!r} gradients have what earlier exchanges lost added to "
                    "them: two at the same weights differ, which it may take for curvature. Take "
                    "an algorithm without error feedback"
                )
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            loss = self._everybodys(loss)
            if self.skips:
                raise UsageError(
                    "gradients are not finite, and a step with a closure cannot be skipped: use "
                    "check_finite=report"
                )
            return loss

        return evaluate

    def _everybodys(self, loss: Any) -> Any:
        """Its average, where gradients are: an optimizer may look at it, and must do so alike."""
        is_tensor = isinstance(loss, torch.Tensor) and loss.is_floating_point()
        if not self._driver.shares_gradients or not (is_tensor or isinstance(loss, float)):
            return loss
        mine = loss.detach() if is_tensor else torch.tensor(loss, dtype=torch.float64)
        name, group = self._standing.name("loss"), self._process_set
        mean = ops.allreduce(mine, name=name, op=Average, process_set=group)
        return mean if is_tensor else mean.item()

    # ---- a GradScaler --------------------------------------------------------------------------

    def forget_scaler(self) -> None:
        """A GradScaler was made anew on every rank: what the one before had done does not count."""
        self._scaling = Scaling()

    @property
    def unscales(self) -> bool:
        """Whether a GradScaler calls `step()` even after an overflow, and leaves the rest to it.

        Gradients that all share have overflown on all ranks. Where they have not been shared, the
        others would wait for a rank that does not step. One that cannot be used at all has to come
        here, to hear so.
        """
        return not self._driver.shares_gradients or self._algorithm.what == "momentum"

    @property
    @in_one_piece
    def _step_supports_amp_scaling(self) -> bool:
        """A GradScaler asks for it before it looks for an overflow, which all ranks must see alike.

        After a pass that only accumulated they would not, and whose `step()` is left out would be
        missing in the exchange that the others' begin with.
        """
        self._catch_up()
        if not self.unscales and not self._skip_synchronize:
            self.synchronize()
        return self.unscales

    def unscaled(self, told: torch.optim.Optimizer, alone: bool = False) -> bool:
        """Whether gradients can be used, after a GradScaler that told this object about them."""
        if self._algorithm.what == "momentum" and self._scaling.forget(told):
            raise UsageError(
                f"{self._algorithm!r} mixes gradients with momentum before a GradScaler could "
                "unscale them: train in bfloat16 or float32, without it"
            )
        params = (param for group in self.param_groups for param in group["params"])
        return self._scaling.unscaled(told, params, self._step, alone)

    def __repr__(self) -> str:
        return f"Distributed{self.inner!r} by {self._algorithm!r}"


def no_sync(optimizer: DistributedOptimizer) -> Any:
    """`optimizer.no_sync()`, as a function."""
    return optimizer.no_sync()
