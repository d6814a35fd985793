"""Presets that average gradients, under optimizers that remember, against one loop over all ranks.

The other presets' loops are in test_optimizer.py, test_low_rank.py, test_qadam.py,
test_velocity.py, test_background.py and test_between_steps.py.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from common.simulation import Simulation
from torch import nn

from bagua.algorithms import Algorithm, ByteGrad, TopK
from bagua.common.world import world

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = [(60, 90), (7,), (2, 1000)]
OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}
# Ranks that share memory encode nothing if they are hierarchical.
ALGORITHMS = [
    ByteGrad(hierarchical=False),
    ByteGrad(hierarchical=False, error_feedback=True),
    ByteGrad(hierarchical=False, error_feedback=True, warmup_steps=2),
    Algorithm(codec="sign1"),
    TopK(hierarchical=False, density=0.05),
    TopK(hierarchical=False, density=0.05, warmup_steps=4),
]


@pytest.fixture
def keep_order(monkeypatch, hvd):
    """Learning the order lays buckets out anew after the first step."""
    config = dataclasses.replace(world().config, learn_bucket_order=False)
    monkeypatch.setattr(world(), "config", config)


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def backward(params, rank: int, step: int) -> None:
    """Every rank pulls the weights somewhere else in every step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    goals = [torch.randn(param.shape, generator=generator) for param in params]
    (sum((p - goal).square().sum() for p, goal in zip(params, goals)) / 4).backward()


class Central:
    """The mean that all ranks step by, from the gradients of each."""

    def __init__(self, algorithm: Algorithm, n: int) -> None:
        self._algorithm, self._n = algorithm, n
        self._simulation: Simulation | None = None

    def mean(self, gradients: list[list[torch.Tensor]], step: int) -> list[torch.Tensor]:
        now = self._algorithm.at(step)
        means = [torch.stack(theirs).mean(0) for theirs in zip(*gradients)]
        coded = [i for i, shape in enumerate(SHAPES) if not now.keeps_exact("", shape)]
        if now.codec == "raw":
            return means
        flat = np.stack([np.concatenate([g[i].numpy().ravel() for i in coded]) for g in gradients])
        simulation = Simulation(now.plan(None, None, step), self._n, flat.shape[1])
        if self._simulation is not None:  # a density that falls forgets nothing
            simulation.residuals = self._simulation.residuals
        self._simulation = simulation
        parts = torch.from_numpy(simulation.mean(flat)).split([means[i].numel() for i in coded])
        for i, part in zip(coded, parts):
            means[i] = part.view(SHAPES[i])
        return means


@pytest.mark.parametrize("overlap", [True, False], ids=["during backward", "after backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_mean_on_one_machine_is_a_fold_in_rank_order(everyone, hvd, dtype, overlap, monkeypatch):
    """In every bit: whatever is small, in an arena or elsewhere, and wherever a slice begins."""
    monkeypatch.setattr(world(), "overlaps", lambda busy_threads: overlap)
    counts = [1, 63, 1000, 8192, 40_001, 300_007]
    params = [nn.Parameter(torch.zeros(count, dtype=dtype)) for count in counts]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for step in range(3):
        grads = [everyone.draw((count,), dtype, seed=step) for count in counts]
        optimizer.zero_grad(set_to_none=step < 2)
        sum((p * theirs[everyone.me]).sum() for p, theirs in zip(params, grads)).backward()
        for param, theirs in zip(params, grads):
            total = functools.reduce(torch.add, [grad.to(wide) for grad in theirs])
            mean = (total / everyone.size).to(dtype)
            assert torch.equal(param.grad, mean)
            assert torch.equal(hvd.allreduce(theirs[everyone.me]), mean)
        optimizer.step()


@pytest.mark.usefixtures("keep_order")
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_is_what_one_loop_over_all_ranks_gives(everyone, hvd, algorithm, kind):
    params, replica = weights(), weights()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](params), algorithm=algorithm)
    reference, central = OPTIMIZERS[kind](replica), Central(algorithm, everyone.size)
    for step in range(6):
        optimizer.zero_grad()
        backward(params, everyone.me, step)
        optimizer.step()
        gradients = []
        for rank in everyone.ranks:
            reference.zero_grad()
            backward(replica, rank, step)
            gradients.append([param.grad.clone() for param in replica])
        for param, mean in zip(replica, central.mean(gradients, step)):
            param.grad = mean
        reference.step()
        for ours, right in zip(params, replica):
            # An exact mean may be rounded in another order, and so the next code be another one.
            far = ~torch.isclose(ours, right, rtol=1e-5, atol=1e-6)
            assert far.float().mean() < 0.01, f"step {step}"
            if not algorithm.at(0).keeps_exact("", ours.shape) and algorithm.at(0).codec != "raw":
                assert torch.equal(ours, right), f"step {step}"
        for theirs in hvd.allgather_object([param.detach() for param in params]):
            assert all(torch.equal(a, b) for a, b in zip(theirs, params))
