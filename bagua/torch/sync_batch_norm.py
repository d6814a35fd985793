"""Batch normalization over the batches of all ranks.

Each rank sends the count, the mean and the sum of squared deviations of its part, which are then
combined without cancellation (Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances, 1979). Backward sums two values per channel over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from bagua.common.errors import UsageError
from bagua.common.kinds import Sum
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.torch import ops


class SyncBatchNorm(_BatchNorm):
    """`nn.BatchNorm` of the concatenated batches of all ranks of a process set.

    Ranks may have batches of different sizes, also empty ones. In evaluation mode nothing is
    exchanged.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise UsageError(
                f"SyncBatchNorm needs an input (batch, channels, …), not {list(input.shape)}"
            )
        if input.shape[1] != self.num_features:
            raise UsageError(
                f"SyncBatchNorm over {self.num_features} channels got an input of shape "
                f"{list(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        by_batch = self.training or self.running_mean is None
        if not by_batch or self.process_set.size() == 1:
            return super().forward(input)
        output, mean, variance, count = _Normalize.apply(
            input, self.weight, self.bias, self.eps, self.process_set
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        return output

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Moves the running statistics; without a momentum they are the average over all steps."""
        steps, running = self.num_batches_tracked, (self.running_mean, self.running_var)
        assert steps is not None
        steps.add_(1)
        for statistic, value in zip(running, (mean, variance)):
            assert statistic is not None
            dtype = statistic.dtype
            factor = steps.to(dtype).reciprocal() if self.momentum is None else self.momentum
            statistic.lerp_(value.to(dtype), factor)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """The module with every `nn.BatchNorm*` replaced; parameters and buffers are shared."""
        return cls._convert(module, process_set, {})

    @classmethod
    def _convert(
        cls,
        module: torch.nn.Module,
        process_set: ProcessSet,
        done: dict[torch.nn.Module, torch.nn.Module],
    ) -> torch.nn.Module:
        if module in done:  # used twice in the model: stays one module
            return done[module]
        done[module] = module
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            done[module] = cls._like(module, process_set)
        for name, child in module._modules.items():
            if child is not None:
                setattr(done[module], name, cls._convert(child, process_set, done))
        return done[module]

    @classmethod
    def _like(cls, module: Any, process_set: ProcessSet) -> torch.nn.Module:
        converted = cls(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_set,
            device="meta",  # what it allocates is replaced at once
        )
        converted._parameters = module._parameters.copy()
        converted._buffers = module._buffers.copy()
        return converted.train(module.training)


class _Normalize(torch.autograd.Function):
    """Output, and mean, variance and count of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, input: Any, weight: Any, bias: Any, eps: float, process_set: ProcessSet
    ) -> Any:
        exact = _exact(input)
        mean, variance, count = _statistics(exact, process_set)
        # Who has two needs not look, for which the host would wait for a GPU.
        if _count(exact) < 2 and count < 2:
            raise UsageError(
                f"SyncBatchNorm: {count:g} values per channel on all ranks of {process_set.ranks} "
                "together; training needs at least 2"
            )
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.process_set = process_set
        if weight is not None:
            weight, bias = weight.to(exact.dtype), bias.to(exact.dtype)
        output = torch.nn.functional.batch_norm(exact, mean, variance, weight, bias, eps=eps)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        input, weight, mean, scale, count = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        normalized = (_exact(input) - _column(mean, input)) * _column(scale, input)
        dims = _all_but_channels(input)
        sums = torch.stack([grad.sum(dims), (grad * normalized).sum(dims)])
        # Gradients of weight and bias stay local: the optimizer averages them like all others.
        grad_bias, grad_weight = sums.clone()
        grad_input = None
        if ctx.needs_input_grad[0]:
            ops.allreduce_(sums, op=Sum, process_set=ctx.process_set)
            sums /= count
            grad_input = grad - _column(sums[0], grad) - normalized * _column(sums[1], grad)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            grad_input = (grad_input * _column(factor, grad)).to(input.dtype)
        if weight is None:
            return grad_input, None, None, None, None
        return grad_input, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None


def _count(input: torch.Tensor) -> int:
    """Values per channel, of this rank."""
    return input.numel() // max(input.shape[1], 1)


def _statistics(exact: torch.Tensor, process_set: ProcessSet) -> tuple[Any, Any, torch.Tensor]:
    """Mean, variance and count per channel over all ranks."""
    channels, count = exact.shape[1], _count(exact)
    if count:
        variance, mean = torch.var_mean(exact, _all_but_channels(exact), correction=0)
    else:
        variance = mean = exact.new_zeros(channels)
    # In float64: float32 could not count beyond 2^24, and these are few numbers.
    mine = torch.cat([mean, variance * count, mean.new_zeros(1)]).double()
    mine[-1].fill_(count)  # to assign would wait for a device
    everyone = ops.allgather(mine.unsqueeze(0), process_set=process_set)
    means, squares, counts = everyone.split([channels, channels, 1], dim=1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = (squares + counts * (means - mean) ** 2).sum(0) / total
    return mean.to(exact.dtype), variance.to(exact.dtype), total


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit floats are computed with in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _all_but_channels(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _column(per_channel: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values per channel in a shape that broadcasts over an input."""
    return per_channel.view(1, -1, *[1] * (like.dim() - 2))
