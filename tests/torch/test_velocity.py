"""Momentum before the exchange, and a share of values that falls."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from common.simulation import coding_of, travel
from torch import nn

from bagua.algorithms import Algorithm, PerParameter, TopK

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = [(7,), (60, 90), (2, 1000)]
DEEP = TopK(momentum_correction=0.9, density=0.05, hierarchical=False)


def gradient(rank: int, step: int, shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def made(hvd, algorithm, lr=0.1, shapes=SHAPES):
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    sgd = torch.optim.SGD(params, lr=lr)
    return params, hvd.DistributedOptimizer(sgd, algorithm=algorithm)


def backward(params, rank: int, step: int) -> None:
    sum((p * gradient(rank, step, p.shape)).sum() for p in params).backward()


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_without_a_codec_it_is_momentum(everyone, hvd, warmup_steps):
    algorithm = Algorithm(momentum_correction=0.9, warmup_steps=warmup_steps)
    assert_momentum(everyone, hvd, algorithm)


def test_it_is_momentum_on_one_machine(everyone, hvd):
    """Where everything travels, whatever the codec."""
    assert_momentum(everyone, hvd, TopK(momentum_correction=0.9, density=0.05))


def assert_momentum(everyone, hvd, algorithm) -> None:
    params, optimizer = made(hvd, algorithm)
    alone = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    sgd = torch.optim.SGD(alone, lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(params, everyone.me, step)
        optimizer.step()
        for param in alone:
            grads = [gradient(rank, step, param.shape) for rank in range(everyone.size)]
            param.grad = torch.stack(grads).mean(0)
        sgd.step()
        for ours, theirs in zip(params, alone):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.ranks(2, 3, 4)  # one rank tells nobody, and has momentum as without a codec
def test_is_what_one_loop_over_all_ranks_gives(everyone, hvd):
    """What did not travel keeps its momentum, what did begins anew."""
    (param,), optimizer = made(hvd, DEEP, shapes=[(60, 90)])
    coding = coding_of(DEEP.plan(None, None, 0))
    velocities = np.zeros((everyone.size, 60 * 90), np.float32)
    residuals = np.zeros_like(velocities)
    for step in range(6):
        optimizer.zero_grad()
        backward([param], everyone.me, step)
        total = np.zeros(60 * 90, np.float32)
        for rank in range(everyone.size):
            mine = gradient(rank, step, (60, 90)).numpy().ravel()
            # As torch does it, without rounding in between.
            before = torch.from_numpy(velocities[rank])
            velocities[rank] = torch.add(torch.from_numpy(mine), before, alpha=0.9).numpy()
            total += travel(coding, velocities[rank], residuals[rank])
            velocities[rank][residuals[rank] == 0] = 0
        right = total / np.float32(everyone.size)
        assert np.array_equal(param.grad.numpy().ravel(), right), f"step {step}"
        optimizer.step()


@pytest.mark.parametrize("algorithm", [DEEP, TopK(momentum_correction=0.5, warmup_steps=4)])
@pytest.mark.parametrize("resume_at", [1, 3])
def test_resumes_in_the_same_bits(everyone, hvd, algorithm, resume_at):
    def trained(resume_at):
        params, optimizer = made(hvd, algorithm)
        for step in range(6):
            if step == resume_at:
                state = copy.deepcopy((params, optimizer.state_dict()))
                params, optimizer = made(hvd, algorithm)
                for param, value in zip(params, state[0]):
                    param.data.copy_(value)
                optimizer.load_state_dict(state[1])
            optimizer.zero_grad()
            backward(params, everyone.me, step)
            optimizer.step()
        return params

    for whole, resumed in zip(trained(-1), trained(resume_at)):
        assert torch.equal(whole, resumed)


def test_recovers_from_one_bad_step(everyone, hvd):
    params, optimizer = made(hvd, DEEP, lr=0.0)
    for step in range(4):
        optimizer.zero_grad()
        backward(params, everyone.me, step)
        if step == 1:
            optimizer.zero_grad()
            sum((p * torch.inf).sum() for p in params).backward()
        finite = all(bool(param.grad.isfinite().all()) for param in params)
        assert finite == (step != 1)
        optimizer.step()


def test_the_share_of_values_falls(everyone, hvd):
    algorithm = TopK(density=0.01, warmup_steps=6, hierarchical=False)
    shares = [algorithm.at(step).density for step in range(8)]
    assert shares == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01, 0.01]
    assert TopK(density=0.5, warmup_steps=2).at(0).density == 0.5
    assert TopK().at(0) == TopK()
    params, optimizer = made(hvd, algorithm, shapes=[(64, 64)])
    for step in range(8):
        optimizer.zero_grad()
        backward(params, everyone.me, step)
        kept, coming = round(4096 * shares[step]), int((params[0].grad != 0).sum())
        if everyone.size > 1:
            assert kept * 0.95 < coming <= kept * everyone.size
        optimizer.step()
    everywhere = hvd.allgather_object(params[0].detach())
    assert all(torch.equal(theirs, params[0]) for theirs in everywhere)


@pytest.mark.ranks(1)
def test_what_makes_no_sense(hvd):
    params = [nn.Parameter(torch.ones(3, 3))]
    for inner in (torch.optim.SGD(params, lr=0.1, momentum=0.9), torch.optim.Adam(params)):
        with pytest.raises(hvd.UsageError, match="momentum of its own"):
            hvd.DistributedOptimizer(inner, algorithm=DEEP)
    late = Algorithm(momentum_correction=0.5, warmup_steps=4)
    with pytest.raises(hvd.UsageError, match="leave op=Sum out"):
        hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), op=hvd.Sum, algorithm=late)
    for mistake in (
        lambda: Algorithm(momentum_correction=1.0),
        lambda: Algorithm(momentum_correction=0.9, what="delta"),
        lambda: Algorithm(momentum_correction=0.9, low_rank=2),
        lambda: PerParameter({"*": DEEP}),
    ):
        with pytest.raises(hvd.UsageError, match="momentum"):
            mistake()
