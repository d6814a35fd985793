"""Gradients as products of thin matrices: what is lost is kept, and replicas stay equal."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from bagua.algorithms import PowerSGD
from bagua.torch.arrays import is_on_device
from bagua.torch.claims import claims
from bagua.torch.low_rank import LowRankBucket

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


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Products:
    """What all ranks keep of one matrix, in double precision: e of each rank, and the last Q."""

    def __init__(self, shape, number: int, low_rank: int, n: int) -> None:
        rows, columns = shape[0], math.prod(shape[1:])
        generator = torch.Generator().manual_seed(number)
        # Where the engine's begins, too: anything that is the same on all ranks would do.
        self.q = torch.empty(min(low_rank, rows, columns), columns).normal_(generator=generator)
        self.q = self.q.double().T
        self.lost = [torch.zeros(rows, columns, dtype=torch.float64) for _ in range(n)]

    def mean(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        wholes = [g.reshape(e.shape) + e for g, e in zip(gradients, self.lost)]
        p = sum(whole @ self.q for whole in wholes) / len(wholes)
        p = torch.linalg.qr(p)[0]
        self.q = sum(whole.T @ p for whole in wholes) / len(wholes)
        result = p @ self.q.T
        self.lost = [whole - result for whole in wholes]
        return result.reshape(gradients[0].shape)


@pytest.mark.parametrize("warmup_steps", [0, 2])
@pytest.mark.parametrize("low_rank", [1, 2])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_is_what_one_loop_over_all_ranks_gives(everyone, hvd, kind, low_rank, warmup_steps):
    """Gradients depend on weights here, so every step rests on those before."""

    def make(dtype):
        starts = [gradient(99, number, shape) for number, shape in enumerate(SHAPES)]
        return [nn.Parameter(start.to(dtype)) for start in starts]

    def pull(params, rank: int, step: int) -> None:
        goals = [gradient(rank, step, p.shape).to(p.dtype) for p in params]
        (sum((p - goal).square().sum() for p, goal in zip(params, goals)) / 4).backward()

    algorithm = PowerSGD(low_rank=low_rank, warmup_steps=warmup_steps)
    params, replica = make(torch.float32), make(torch.float64)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](params), algorithm=algorithm)
    reference, n = OPTIMIZERS[kind](replica), everyone.size
    products = {
        number: Products(shape, number, low_rank, n)
        for number, shape in enumerate(SHAPES)
        if n > 1 and not algorithm.keeps_exact("", shape)
    }
    for step in range(6):
        optimizer.zero_grad()
        pull(params, everyone.me, step)
        gradients = []
        for rank in everyone.ranks:
            reference.zero_grad()
            pull(replica, rank, step)
            gradients.append([param.grad.clone() for param in replica])
        for number, (ours, right) in enumerate(zip(params, replica)):
            theirs = [mine[number] for mine in gradients]
            if step < warmup_steps or number not in products:
                right.grad = sum(theirs) / n
            else:
                right.grad = products[number].mean(theirs)
            torch.testing.assert_close(ours.grad.double(), right.grad, rtol=1e-3, atol=1e-4)
        if step >= warmup_steps:
            for number, product in products.items():
                kept = lost(optimizer)[f"parameter.{number}"].double()
                torch.testing.assert_close(kept, product.lost[everyone.me], rtol=1e-3, atol=1e-4)
        optimizer.step()
        reference.step()
    for ours, right in zip(params, replica):
        torch.testing.assert_close(ours.double(), right, rtol=1e-3, atol=1e-4)


def exchanged(hvd, values, low_rank: int, steps: int):
    """The gradient that comes of these values in the last of so many steps."""
    param = nn.Parameter(torch.zeros_like(values))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.0), algorithm=PowerSGD(low_rank=low_rank, warmup_steps=0)
    )
    for _ in range(steps):
        optimizer.zero_grad()
        (param * values).sum().backward()
        optimizer.step()
    return param.grad


def test_a_matrix_of_that_rank_is_exact_in_the_end(everyone, hvd):
    mean = gradient(0, 1, (20, 2)) @ gradient(0, 2, (2, 30))
    torch.testing.assert_close(exchanged(hvd, mean, 3, 3), mean, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_gradients_of_any_size(everyone, hvd, scale):
    """Though P is of the size of the gradient and Q."""
    mean = gradient(0, 1, (20, 1)) @ gradient(0, 2, (1, 30))
    result = exchanged(hvd, mean * scale, 2, 4)
    torch.testing.assert_close(result / scale, mean, rtol=1e-3, atol=1e-3)


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
    nbytes = 256 * 512 * 4
    if everyone.size > 1 or claims.contested:  # as optimizers of earlier tests may leave it
        touched -= 2 * nbytes  # the gradient's way into the arena
    assert 0 <= sent + touched < nbytes / 4


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


@pytest.mark.ranks(2, 3, 4)
def test_one_rank_fails_between_the_rounds_and_all_go_on(everyone, hvd, monkeypatch):
    params, optimizer = make(hvd, PowerSGD(low_rank=2, warmup_steps=0))
    for step in range(4):
        with monkeypatch.context() as patch:
            if step == 1 and everyone.me == 0:
                patch.setattr(LowRankBucket, "_project", lambda *_: 1 / 0)
            if step != 1:
                backward(everyone, params, optimizer, step)
                optimizer.step()
                continue
            kind = ZeroDivisionError if everyone.me == 0 else hvd.UsageError
            with pytest.raises(kind, match="ivision"):
                backward(everyone, params, optimizer, step)
            optimizer.zero_grad()
    for theirs in hvd.allgather_object([param.detach() for param in params]):
        assert all(torch.equal(a, p) for a, p in zip(theirs, params))


@pytest.mark.ranks(2, 3)
def test_a_rank_whose_processor_multiplies_otherwise(everyone, hvd, monkeypatch):
    """As one with other instructions, or other numbers of threads, does."""
    multiply = torch.matmul

    def otherwise(a, b, out=None):
        product = multiply(a.double(), b.double()).float()
        return product if out is None else out.copy_(product)

    params, optimizer = make(hvd, PowerSGD(low_rank=2, warmup_steps=0))
    if everyone.me == 1 and not is_on_device(params[0]):  # all devices are alike
        monkeypatch.setattr(torch, "matmul", otherwise)
    for step in range(6):
        backward(everyone, params, optimizer, step)
        optimizer.step()
        for theirs in hvd.allgather_object([param.detach() for param in params]):
            assert all(torch.equal(a, p) for a, p in zip(theirs, params))


@pytest.mark.ranks(2, 3, 4)
def test_one_rank_fails_and_all_go_on(everyone, hvd):
    params, optimizer = make(hvd, PowerSGD(low_rank=2, warmup_steps=0))
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
