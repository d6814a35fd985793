"""What is trained to measure a step, and what a step is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.measure import Run


def mlp(hidden: int = 3) -> torch.nn.Module:
    """40 MB: 784-2048-2048-2048-10, or with more or fewer hidden layers, which are as wide then."""
    weights = 784 * 2048 + 2 * 2048**2 + 2048 * 10
    ends, inner = 784 + 10, hidden - 1
    root = math.sqrt(ends**2 + 4 * inner * weights)
    width = round((root - ends) / (2 * inner) if inner else weights / ends)
    sizes = (784, *[width] * hidden, 10)
    layers: list[torch.nn.Module] = []
    for fan_in, fan_out in zip(sizes, sizes[1:]):
        layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class _ManyGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
        ctx.count, ctx.device = len(params), params[0].device
        return params[0].sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return tuple(torch.ones(1024, device=ctx.device) for _ in range(ctx.count))


class ManyParameters(torch.nn.Module):
    """Parameters of 4 KB whose gradients cost next to nothing to compute."""

    def __init__(self, count: int = 500) -> None:
        super().__init__()
        self.params = torch.nn.ParameterList(torch.ones(1024) for _ in range(count))

    def forward(self, _: torch.Tensor) -> Any:
        return _ManyGradients.apply(*self.params)  # type: ignore[no-untyped-call]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def steps(
    peers: Mapping[str, Any], model_of: Callable[[], torch.nn.Module], inputs: torch.Tensor
) -> dict[str, Run]:
    """A step of each system that can train, with a model and an optimizer of its own."""
    runs: dict[str, Run] = {}
    for name, peer in peers.items():
        if hasattr(peer, "trainer"):
            torch.manual_seed(0)
            model, optimizer = peer.trainer(model_of())
            runs[name] = partial(step, model, optimizer, inputs)
    return runs
