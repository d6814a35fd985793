"""Backward passes that raise: what this rank and the others find afterwards."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from bagua.algorithms import GradientAllreduce, PowerSGD, TopK
from bagua.torch import buckets

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usefixtures("overlap")]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on purpose")


def test_a_backward_after_one_that_has_failed(everyone, hvd):
    """Nothing but the second call of backward tells that the first one has ended."""
    params = [nn.Parameter(torch.zeros(n)) for n in (10, 200_000)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    for _ in range(2):
        for failing in (0, 1):
            optimizer.zero_grad()
            good, bad = params[failing - 1], params[failing]
            with pytest.raises(ArithmeticError):
                (good.sum() + Fails.apply(bad).sum()).backward()
            for param in params:
                param.grad = None
            sum((everyone.me + 1) * param.sum() for param in params).backward()
            for param in params:
                assert (param.grad == (everyone.size + 1) / 2).all()
            optimizer.step()


def test_a_smaller_backward_after_one_that_has_failed(everyone, hvd):
    params = [nn.Parameter(torch.zeros(10)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    for step in range(4):
        optimizer.zero_grad()
        if step > 1:  # the order is known
            with pytest.raises(ArithmeticError):
                (Fails.apply(params[0]).sum() + params[1].sum() + params[2].sum()).backward()
            for param in params:
                param.grad = None
        ((everyone.me + 1) * (params[1].sum() + params[2].sum())).backward()
        for param in params[1:]:
            assert (param.grad == (everyone.size + 1) / 2).all()
        optimizer.step()


def test_an_error_while_gradients_only_accumulate_is_nobody_elses(everyone, hvd):
    param = nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            if everyone.me == 0:
                with pytest.raises(ArithmeticError):
                    (param.sum() + Fails.apply(param).sum()).backward()
            param.sum().backward()
        optimizer.zero_grad()
        ((everyone.me + 1) * param.sum()).backward()
        assert (param.grad == (everyone.size + 1) / 2).all()
        optimizer.step()


def test_an_error_in_backward_leaves_no_trace(everyone, hvd):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    oracle = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    rows = torch.randn(everyone.size, 6)
    mine = rows[everyone.me : everyone.me + 1].requires_grad_(True)
    with pytest.raises(ArithmeticError):
        model[2](Fails.apply(model[1](model[0](mine)))).sum().backward()
    optimizer.zero_grad()
    model(mine).square().mean().backward()
    optimizer.step()
    oracle(rows).square().mean().backward()
    reference.step()
    for ours, right in zip(model.parameters(), oracle.parameters()):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


EXCHANGES = {
    "exact": GradientAllreduce,
    "with residuals": lambda: TopK(hierarchical=False),
    "in two halves": lambda: PowerSGD(warmup_steps=0),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", ["among", "below"])
@pytest.mark.parametrize("at", [0, 1, 3], ids=lambda at: f"in step {at}")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_others_hear_at_once(everyone, hvd, exchange, at, where):
    """The rank whose backward has raised comes to another operation next, not to the optimizer.

    Of three buckets two have left by then, if any leaves during backward; or all gradients have
    come, and what raises is below them, as in layers that are frozen.
    """
    first, middle, last = params = [nn.Parameter(torch.ones(40, 30)) for _ in range(3)]
    sgd = torch.optim.SGD(params, lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, num_groups=3, algorithm=EXCHANGES[exchange]())
    skipped = []
    for step in range(5):
        optimizer.zero_grad()
        fails = step == at and everyone.me == 0
        rows = torch.ones(1, 1, requires_grad=True)
        if fails:
            rows, hidden = (
                (Fails.apply(rows), first) if where == "below" else (rows, Fails.apply(first))
            )
        else:
            hidden = first
        loss = (middle * (hidden * last * rows).mean()).mean() * (everyone.me + 1)
        bad = torch.zeros(1)
        if fails:
            with pytest.raises(ArithmeticError):
                loss.backward()
            bad += 1
        elif step == at:
            with pytest.raises(ValueError, match="rank 0: backward raised an exception"):
                loss.backward()
        else:
            loss.backward()
        if hvd.allreduce(bad, op=hvd.Max, name="bad").item():
            skipped.append(step)
            continue
        optimizer.step()
        assert_same_everywhere(hvd, params)
    assert skipped == [at]


def assert_same_everywhere(hvd, params) -> None:
    for theirs in hvd.allgather_object([(p.detach(), p.grad) for p in params]):
        for param, (values, grad) in zip(params, theirs):
            assert torch.equal(param, values)
            assert torch.equal(param.grad.to_dense(), grad.to_dense())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("exchange", [*EXCHANGES, "sparse", "alone"])
def test_who_raises_between_two_optimizers(everyone, hvd, exchange, own_compression):
    """It has not come to the second, whose gradients the others have sent."""
    torch.manual_seed(0)
    models = [nn.Embedding(8, 8, sparse=exchange == "sparse"), nn.Linear(8, 1)]
    sgds = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def wrapped():
        how = {"algorithm": EXCHANGES.get(exchange, GradientAllreduce)()}
        how |= {"compression": own_compression} if exchange == "alone" else {}
        below = hvd.DistributedOptimizer(sgds[0], [("words", models[0].weight)], **how)
        return [below, hvd.DistributedOptimizer(sgds[1])]

    optimizers = wrapped()
    torch.manual_seed(everyone.me)

    def step(fails: bool = False) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        hidden = models[0](torch.randint(8, (4,)))
        hidden = Fails.apply(hidden) if fails else hidden
        models[1](hidden.tanh()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    step()
    last = everyone.size - 1
    with pytest.raises(ArithmeticError if everyone.me == last else hvd.UsageError):
        step(fails=everyone.me == last)
    with pytest.raises(hvd.BaguaError, match=r"gave up in the middle|passes that had failed"):
        step()
    hvd.barrier()
    optimizers = wrapped()
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), 0)
    step()
    for model in models:
        assert_same_everywhere(hvd, list(model.parameters()))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_who_raises_below_two_optimizers(everyone, hvd, exchange):
    """All hear of both, and can go on."""
    models = [nn.Linear(8, 8), nn.Linear(8, 1)]
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), 0)
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), num_groups=2, algorithm=algorithm()
        )
        for model, algorithm in zip(models, (EXCHANGES[exchange], GradientAllreduce))
    ]
    torch.manual_seed(everyone.me)
    for number in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        rows = torch.randn(4, 8, requires_grad=True)
        fails = number in (2, 4)
        rows = Fails.apply(rows) if fails and everyone.me == 0 else rows
        error = ArithmeticError if everyone.me == 0 else hvd.UsageError
        with pytest.raises(error) if fails else contextlib.nullcontext():
            models[1](models[0](rows).tanh()).square().mean().backward()
        if hvd.allreduce(torch.tensor(float(fails)), op=hvd.Max):
            continue
        for optimizer in optimizers:
            optimizer.step()
    for model in models:
        assert_same_everywhere(hvd, list(model.parameters()))


@pytest.mark.ranks(2, 3)
def test_two_passes_that_fail_before_the_next_step_are_two(everyone, hvd):
    """Of an optimizer each. The first notices once more when its next one begins."""
    params = [nn.Parameter(torch.ones(10)) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1)) for param in params]
    for number in range(5):
        fails = number in (1, 3)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for param in params:
            below = torch.ones(1, requires_grad=True)
            below = Fails.apply(below) if fails and everyone.me == 0 else below
            error = ArithmeticError if everyone.me == 0 else hvd.UsageError
            with pytest.raises(error) if fails else contextlib.nullcontext():
                (param.mean() * (everyone.me + 1) * below).backward()
        for optimizer in [] if fails else optimizers:
            optimizer.step()
    assert_same_everywhere(hvd, params)


@pytest.mark.ranks(2)
def test_a_gradient_that_had_left_a_wrapper_is_nobodys(everyone, hvd, overlap):
    """Its place in memory may be another's next, and this one may be one that is under way."""
    params = [nn.Parameter(torch.ones(200_000)) for _ in range(2)]
    sgd = torch.optim.SGD(params, lr=0.1)
    for _ in range(4):
        optimizer = hvd.DistributedOptimizer(sgd, num_groups=2)
        for fails in (False, False, True):
            optimizer.zero_grad()
            below = torch.ones(1, requires_grad=True)
            below = Fails.apply(below) if fails else below
            loss = params[1].sum() * (params[0].mean() * below)
            with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
                loss.backward()
                optimizer.step()
        del loss, optimizer
    hvd.DistributedOptimizer(sgd)
    assert not buckets._flying | buckets._lent
