"""Gradients that nobody has zeroed, and those of several evaluations in a step."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm, PowerSGD, TopK

pytestmark = pytest.mark.ranks(1, 2, 3)

# What is no plain average.
OTHERS = {
    "sum": lambda hvd: {"op": hvd.Sum},
    "max": lambda hvd: {"op": hvd.Max},
    "powersgd": lambda hvd: {"algorithm": PowerSGD(low_rank=1, warmup_steps=0)},
    "velocities": lambda hvd: {"algorithm": Algorithm(momentum_correction=0.9)},
}


@pytest.fixture(params=list(OTHERS))
def other(request, hvd):
    return OTHERS[request.param](hvd)


def made(hvd, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 6)).square().sum().backward()


@pytest.mark.ranks(2, 3)
def test_those_of_the_last_step_are_not_exchanged_again(everyone, hvd, other):
    model, optimizer = made(hvd, **other)
    backward(model)
    optimizer.step()
    backward(model)
    weights = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(hvd.UsageError, match=r"still has that of the last step.*zero_grad"):
            optimizer.step()
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    for _ in range(3):  # as it says
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("op", ["Average", "Sum", "Adasum"])
def test_what_somebody_elses_loss_leaves_may_be_zeroed_before_its_own(everyone, hvd, op, paused):
    """As a discriminator does, through which the generator of a GAN learns."""

    def trained(between) -> torch.Tensor:
        model, optimizer = made(hvd, op=getattr(hvd, op))
        for _ in range(4):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            between(model, optimizer)
        return model[0].weight

    def other_loss(model, optimizer) -> None:
        with optimizer.no_sync() if paused else contextlib.nullcontext():
            model(torch.full((2, 6), 3.0)).sum().backward()

    assert torch.equal(trained(other_loss), trained(lambda *_: None))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model", "wrapped"])
def test_who_zeroes_may(everyone, hvd, other, whose, set_to_none):
    model, optimizer = made(hvd, **other)
    for _ in range(4):
        {"optimizer": optimizer, "model": model, "wrapped": optimizer.inner}[whose].zero_grad(
            set_to_none
        )
        backward(model)
        optimizer.step()


def test_an_average_may_be_averaged_again(everyone, hvd):
    """As without ranks, gradients add up."""
    model, optimizer = made(hvd)
    backward(model)
    first = model[1].weight.grad.clone()
    optimizer.inner.param_groups[0]["lr"] = 0.0
    optimizer.step()
    backward(model)
    torch.testing.assert_close(model[1].weight.grad, 2 * first)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("remembers", [True, False])
def test_evaluations_that_depend_on_the_last_one_are_told(everyone, hvd, remembers):
    torch.manual_seed(0)
    model = nn.Linear(6, 400)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    lossy = TopK(hierarchical=False) if remembers else Algorithm(codec="minmax_u8")
    optimizer = hvd.DistributedOptimizer(lbfgs, model.named_parameters(), algorithm=lossy)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().sum()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step(closure)
    texts = [str(each.message) for each in told]
    assert any("LBFGS evaluates more than once in a step" in text for text in texts) == remembers


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("paused", [True, False])
def test_what_error_feedback_keeps_of_gradients_thrown_away_is_told(everyone, hvd, paused):
    model, optimizer = made(hvd, algorithm=Algorithm(codec="minmax_u8", error_feedback=True))

    def told(scale: float) -> bool:
        with optimizer.no_sync() if paused else contextlib.nullcontext():
            (scale * model(torch.ones(2, 6)).square().sum()).backward()
        with warnings.catch_warnings(record=True) as all_told:
            warnings.simplefilter("always")
            optimizer.zero_grad()
        return any("are thrown away" in str(each.message) for each in all_told)

    assert told(1.0) != paused
    assert not told(float("inf"))  # as a GradScaler may: nothing is kept of that
    backward(model)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()  # these were used
