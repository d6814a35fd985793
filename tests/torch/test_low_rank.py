"""Gradients as products of thin matrices: what is lost is kept, and replicas stay equal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bagua.algorithms import PowerSGD

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = [(30, 40), (8,), (16, 4, 3, 3), (2, 2), (25, 60)]


def gradient(rank: int, step: int, shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def make(hvd, algorithm):
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    return params, hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), algorithm=algorithm)


def backward(everyone, params, optimizer, step: int) -> None:
    optimizer.zero_grad()
    sum((p * gradient(everyone.me, step, p.shape)).sum() for p in params).backward()


def lost(optimizer) -> dict:
    return {
        name: kept[0]
        for name, kept in optimizer.state_dict()["bagua"]["kept"]["lost"].items()
        if kept
    }


@pytest.fixture(params=[True, False], ids=["during backward", "after backward"])
def overlap(request, monkeypatch, hvd):
    from bagua.common.world import world

    monkeypatch.setattr(world(), "overlaps", lambda busy_threads: request.param)


@pytest.mark.usefixtures("overlap")
def test_what_is_lost_is_kept(everyone, hvd):
    """mean of e + result = mean of (gradient + e before)."""
    params, optimizer = make(hvd, PowerSGD(low_rank=2, warmup_steps=0))
    before: dict = {}
    for step in range(4):
        backward(everyone, params, optimizer, step)
        n = everyone.size
        now = lost(optimizer) if n > 1 else {}
        everyones = hvd.allgather_object((before, now))
        for number, param in enumerate(params):
            mean = sum(gradient(rank, step, param.shape) for rank in range(n)) / n
            name = f"parameter.{number}"
            assert (name in now) == (n > 1 and param.dim() > 1 and param.numel() > 4)
            if name in now:
                old = sum(b[name] for b, _ in everyones if b) / n
                new = sum(a[name] for _, a in everyones) / n
                result = param.grad.reshape(new.shape)
                whole = mean.reshape(new.shape) + old
                torch.testing.assert_close(new + result, whole, rtol=1e-4, atol=1e-5)
                assert torch.linalg.matrix_rank(result) <= 2
            else:
                torch.testing.assert_close(param.grad, mean, rtol=1e-5, atol=1e-6)
        for theirs in hvd.allgather_object([param.grad for param in params]):
            assert all(torch.equal(a, p.grad) for a, p in zip(theirs, params))
        before = copy.deepcopy(now)
        optimizer.step()


def test_a_matrix_of_that_rank_is_exact_in_the_end(everyone, hvd):
    param = nn.Parameter(torch.zeros(20, 30))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.0), algorithm=PowerSGD(low_rank=3, warmup_steps=0)
    )
    mean = gradient(0, 1, (20, 2)) @ gradient(0, 2, (2, 30))
    for _ in range(3):
        optimizer.zero_grad()
        (param * mean).sum().backward()
        optimizer.step()
    torch.testing.assert_close(param.grad, mean, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("resume_at", [1, 3, 4])
def test_resumes_in_the_same_bits(everyone, hvd, resume_at):
    def trained(resume: int):
        params, optimizer = make(hvd, PowerSGD(low_rank=1, warmup_steps=2))
        for step in range(6):
            if step == resume:
                state = copy.deepcopy((params, optimizer.state_dict()))
                params, optimizer = make(hvd, PowerSGD(low_rank=1, warmup_steps=2))
                optimizer.load_state_dict(state[1])
                with torch.no_grad():
                    torch._foreach_copy_(params, state[0])
            backward(everyone, params, optimizer, step)
            optimizer.step()
        return params

    assert all(torch.equal(a, b) for a, b in zip(trained(-1), trained(resume_at)))


def test_bytes(everyone, hvd):
    param = nn.Parameter(torch.zeros(256, 512))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.0), algorithm=PowerSGD(low_rank=4, warmup_steps=0)
    )
    for step in range(3):
        optimizer.zero_grad()
        before = hvd.counters()["sent_nbytes"]
        touched = hvd.counters()["touched_nbytes"]
        (param * gradient(everyone.me, step, (256, 512))).sum().backward()
        sent = hvd.counters()["sent_nbytes"] - before
        touched = hvd.counters()["touched_nbytes"] - touched
    assert sent + touched < (256 * 512 * 4) / 4


def test_recovers_from_one_bad_step(everyone, hvd):
    param = nn.Parameter(torch.zeros(30, 30))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.0), algorithm=PowerSGD(low_rank=2, warmup_steps=0)
    )
    for step in range(4):
        optimizer.zero_grad()
        values = gradient(everyone.me, step, (30, 30))
        if step == 1 and everyone.me == 0:
            values[3, 5] = torch.inf
        (param * values).sum().backward()
        assert bool(param.grad.isfinite().all()) == (step != 1)
        optimizer.step()


def test_one_rank_fails_and_all_go_on(everyone, hvd):
    params, optimizer = make(hvd, PowerSGD(low_rank=2, warmup_steps=0))
    if everyone.size == 1:
        return
    for step in range(4):
        if step != 1:
            backward(everyone, params, optimizer, step)
            optimizer.step()
            continue
        optimizer.zero_grad()
        if everyone.me == 0:
            hook = params[0].register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                sum(p.sum() for p in params).backward()
            hook.remove()
            optimizer.zero_grad()
        else:
            with pytest.raises(hvd.UsageError, match="raised an exception"):
                sum(p.sum() for p in params).backward()
            optimizer.zero_grad()
    for theirs in hvd.allgather_object([param.detach() for param in params]):
        assert all(torch.equal(a, p) for a, p in zip(theirs, params))
