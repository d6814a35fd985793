"""What a wrapped optimizer keeps becomes the same on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua.torch import moments
from bagua.torch.own import keep_own

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def settled(everyone, hvd, optimizer, named):
    """What every rank has afterwards, by name."""
    moments.settle(optimizer, named, "moments", hvd.global_process_set)
    return hvd.allgather_object({name: dict(optimizer.state[param]) for name, param in named})


def assert_same(value, other) -> None:
    assert type(value) is type(other)
    if isinstance(value, torch.Tensor):
        assert value.dtype == other.dtype
        assert torch.equal(value, other)
    elif isinstance(value, dict):
        assert list(value) == list(other)
        for key in value:
            assert_same(value[key], other[key])
    elif isinstance(value, (list, tuple)):
        assert len(value) == len(other)
        for one, two in zip(value, other):
            assert_same(one, two)
    else:
        assert value == other


def stepped(everyone, make, steps, shape=(3, 4), dtype=torch.float32):
    param = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = make([param])
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * everyone.me + step)
        grad = torch.randn(shape, generator=generator).to(dtype)

        def closure(grad=grad):
            param.grad = grad + 0.1 * param.detach()
            return param.detach().square().sum()

        optimizer.step(closure)
    return param, optimizer


OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("shape", [(3, 4), ()])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("unlike", ["values", "counts", "one has none"])
def test_all_of_torchs(everyone, hvd, kind, unlike, shape):
    steps = {"values": 3, "counts": 3 + everyone.me, "one has none": 3 * (everyone.me != 0)}
    param, optimizer = stepped(everyone, OPTIMIZERS[kind], steps[unlike], shape)
    before = hvd.allgather_object(dict(optimizer.state[param]))
    after = settled(everyone, hvd, optimizer, [("w", param)])
    for theirs in after:
        assert_same(theirs, after[0])
    holders = [state for state in before if state]
    if not holders:
        return
    assert after[0]["w"].keys() == holders[0].keys()
    for what, value in after[0]["w"].items():
        if what == "step":
            assert value == holders[0]["step"]
        elif kind != "lbfgs" and isinstance(value, torch.Tensor) and shape and value.ndim:
            mean = sum(state[what].double() for state in holders) / len(holders)
            torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
    optimizer.step(lambda: param.detach().sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(everyone, hvd, dtype):
    """16 bits are summed as 32, and rounded once."""
    param, optimizer = stepped(everyone, OPTIMIZERS["adam"], 2, dtype=dtype)
    before = hvd.allgather_object(dict(optimizer.state[param]))
    (after, *rest) = settled(everyone, hvd, optimizer, [("w", param)])
    for theirs in rest:
        assert_same(theirs, after)
    for what in ("exp_avg", "exp_avg_sq"):
        mean = (sum(state[what].double() for state in before) / everyone.size).to(dtype)
        torch.testing.assert_close(after["w"][what], mean)


def test_what_is_a_ranks_own_stays(everyone, hvd):
    own, shared, frozen = (nn.Parameter(torch.ones(5)) for _ in range(3))
    keep_own([own])
    more = [nn.Parameter(torch.ones(2 + everyone.me), requires_grad=False)]
    optimizer = torch.optim.SGD([own, shared, frozen, *more], lr=0.1, momentum=0.9)
    for param in (own, shared, frozen, *more):
        param.grad = torch.full_like(param, 1.0 + everyone.me)
    optimizer.step()
    names = [("own", own), ("shared", shared), ("frozen", frozen), ("more", more[0])]
    wrapped = hvd.DistributedOptimizer(optimizer, names, algorithm="local_sgd")
    frozen.requires_grad_(False)
    wrapped.set_algorithm("gradient_allreduce")
    mean = 1 + (everyone.size - 1) / 2
    for param, value in (
        (own, 1.0 + everyone.me),
        (shared, mean),
        (frozen, mean),
        (more[0], 1.0 + everyone.me if everyone.size > 1 else 1.0),
    ):
        buffer = optimizer.state[param]["momentum_buffer"]
        torch.testing.assert_close(buffer, torch.full_like(param, value))


def test_memory_formats(everyone, hvd):
    """Who has nothing gets it as others have it."""
    weight = nn.Conv2d(4, 3, 3).weight
    param = nn.Parameter(weight.detach().to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    if everyone.me != 0 or everyone.size == 1:
        param.grad = torch.arange(108.0).view(3, 4, 3, 3).to(memory_format=torch.channels_last)
        optimizer.step()
    settled(everyone, hvd, optimizer, [("w", param)])
    buffer = optimizer.state[param]["momentum_buffer"]
    assert torch.equal(buffer, torch.arange(108.0).view(3, 4, 3, 3))
    assert buffer.is_contiguous(memory_format=torch.channels_last)


def test_the_root_of_a_variance_is_that_of_all(everyone, hvd):
    """QAdam keeps it from step to step."""
    param = nn.Parameter(torch.ones(30, 30))
    optimizer = hvd.DistributedOptimizer(hvd.QAdam([param], warmup_steps=1), algorithm="local_sgd")

    def step(number: int) -> None:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * everyone.me + number)
        (param * torch.randn(30, 30, generator=generator)).sum().backward()
        optimizer.step()

    for number in range(3):
        step(number)
    for algorithm in ("qadam", "gradient_allreduce"):
        optimizer.set_algorithm(algorithm)
        for number in range(3):
            step(number)
            for theirs in hvd.allgather_object(param.detach()):
                assert torch.equal(theirs, param)
