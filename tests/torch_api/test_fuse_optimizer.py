"""`fuse_optimizer` against the same optimizer left alone."""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.ranks(1)

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5),
    "adadelta": lambda groups: torch.optim.Adadelta(groups),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}
kinds = pytest.mark.parametrize("kind", list(OPTIMIZERS))


class Model(nn.Module):
    """Tied, frozen and unused parameters, and two element types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.wide = nn.Linear(6, 3, dtype=torch.float64)
        self.sometimes = nn.Parameter(torch.ones(3))

    def forward(self, inputs, whole):
        out = self.wide(self.frozen(self.tied(self.first(inputs).tanh())).double())
        return (out * self.sometimes if whole else out).square().mean()


def groups_of(model):
    return [
        {"params": [*model.first.parameters(), model.tied.bias, *model.frozen.parameters()]},
        {"params": [*model.wide.parameters(), model.sometimes], "lr": 0.02},
    ]


def train(model, optimizer, steps=4, first=0):
    for step in range(first, first + steps):
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs, whole=step % 2 == 0).backward()
        getattr(optimizer, "fuse_step", optimizer.step)()


def assert_close(one, other):
    for a, b in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@kinds
def test_equals_the_plain_one(bagua, kind):
    model, oracle = Model(), Model()
    plain = OPTIMIZERS[kind](groups_of(oracle))
    optimizer = OPTIMIZERS[kind](groups_of(model))
    assert bagua.contrib.fuse_optimizer(optimizer, do_flatten=True) is optimizer
    assert bagua.contrib.fuse.is_fused_optimizer(optimizer)
    assert not bagua.contrib.fuse.is_fused_optimizer(plain)
    train(model, optimizer)
    train(oracle, plain)
    assert_close(model, oracle)
    assert not torch.equal(model.first.weight, Model().first.weight)
    assert torch.equal(model.frozen.weight, Model().frozen.weight)
    saved, right = optimizer.state_dict(), plain.state_dict()
    assert [list(entry) for entry in saved["state"].values()] == [
        list(entry) for entry in right["state"].values()
    ]


@kinds
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_state_goes_from_one_to_the_other(bagua, kind, way):
    """Of torch's flags too: what is fused stays so, whatever it loads, also what had stepped."""
    model, oracle = Model(), Model()
    optimizers = [OPTIMIZERS[kind](groups_of(m)) for m in (model, oracle)]
    train(model, optimizers[0])
    train(oracle, optimizers[1])
    late = copy.deepcopy(model)
    fresh = OPTIMIZERS[kind](groups_of(late))
    if way == "there":
        bagua.contrib.fuse_optimizer(fresh)
        before = [(group["foreach"], group.get("fused")) for group in fresh.param_groups]
        fresh.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        after = [(group["foreach"], group.get("fused")) for group in fresh.param_groups]
        assert after == before
    else:
        bagua.contrib.fuse_optimizer(optimizers[0])
        fresh.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    train(late, fresh, first=4)
    train(model, bagua.contrib.fuse_optimizer(optimizers[0]), first=4)
    train(oracle, optimizers[1], first=4)
    assert_close(late, oracle)
    assert_close(model, oracle)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@kinds
def test_as_few_calls_for_many_as_for_two(bagua, kind):
    """What has to do with parameters one by one is their count of steps."""
    counts = []
    for number in (2, 50):
        params = [nn.Parameter(torch.ones(8, 8)) for _ in range(number)]
        optimizer = bagua.contrib.fuse_optimizer(OPTIMIZERS[kind](params))
        for param in params:
            param.grad = torch.ones(8, 8)
        optimizer.step()
        with Calls() as calls:
            optimizer.fuse_step()
        counts.append(calls.counts)
    of_steps = {"aten._local_scalar_dense.default", "aten.item.default", "aten.mul.Tensor"}
    of_steps |= {"aten.detach.default", "aten.lift_fresh.default", "aten.alias.default"}
    few, many = ({k: n for k, n in c.items() if k not in of_steps} for c in counts)
    # nadam has a product of its own for each, on the host
    growing = {name for name in many if many[name] > few.get(name, 0)} - {"aten.mul_.Tensor"}
    assert not growing, growing


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("first", ["fused", "bagua", "distributed", "around"])
@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_on_all_ranks(everyone, bagua, first, kind):
    from bagua.torch import DistributedOptimizer

    def built():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        return model, OPTIMIZERS[kind](model.parameters())

    model, optimizer = built()
    oracle, plain = built()
    if first == "fused":
        model.with_bagua([bagua.contrib.fuse_optimizer(optimizer)], "gradient_allreduce")
    elif first == "bagua":
        model.with_bagua([optimizer], "gradient_allreduce")
        bagua.contrib.fuse_optimizer(optimizer)
    elif first == "distributed":
        optimizer = DistributedOptimizer(bagua.contrib.fuse_optimizer(optimizer))
    else:
        optimizer = bagua.contrib.fuse_optimizer(DistributedOptimizer(optimizer))
    assert bagua.contrib.fuse.is_fused_optimizer(optimizer)
    for step in range(4):
        inputs = everyone.draw((5, 6), seed=step)
        optimizer.zero_grad()
        model(inputs[everyone.me]).square().mean().backward()
        optimizer.fuse_step()
        plain.zero_grad()
        oracle(torch.cat(inputs)).square().mean().backward()
        plain.step()
    assert_close(model, oracle)


@pytest.mark.ranks(2)
def test_what_replicas_do_after_a_step_is_not_left_out(everyone, bagua):
    """Averaging weights belongs to `fuse_step` of what is wrapped around, too."""
    from bagua.torch import DistributedOptimizer

    weight = nn.Parameter(torch.zeros(1))
    inner = bagua.contrib.fuse_optimizer(torch.optim.SGD([weight], lr=1.0))
    optimizer = DistributedOptimizer(inner, algorithm="local_sgd")
    before = optimizer.progress
    weight.grad = torch.ones(1)
    optimizer.fuse_step()
    assert optimizer.progress[0] == before[0] + 1


def test_a_scheduler_a_closure_and_a_group_that_comes_later(bagua):
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam([model.weight], lr=0.1) for model in models]
    bagua.contrib.fuse_optimizer(optimizers[0])
    for model, optimizer in zip(models, optimizers):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.add_param_group({"params": [model.bias]})

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that the scheduler has seen no step
            for _ in range(3):
                assert getattr(optimizer, "fuse_step", optimizer.step)(closure) > 0
                scheduler.step()
    assert_close(*models)
    assert [group["fused"] for group in optimizers[0].param_groups] == [True, True]


def test_what_stays_as_it_is(bagua):
    large = [nn.Parameter(torch.ones(100, 100))]
    for optimizer in (
        torch.optim.RMSprop(large),  # would take longer
        torch.optim.ASGD([nn.Parameter(torch.ones(2))]),
        torch.optim.LBFGS(large),
        torch.optim.Adam(large, differentiable=True),
    ):
        groups = [dict(group) for group in optimizer.param_groups]
        with pytest.warns(UserWarning, match="one parameter after the other as before") as caught:
            bagua.contrib.fuse_optimizer(optimizer)
        assert caught[0].filename == __file__
        assert not bagua.contrib.fuse.is_fused_optimizer(optimizer)
        assert optimizer.param_groups == groups
        if not groups[0].get("differentiable"):  # which leaves cannot be
            optimizer.fuse_step(lambda: large[0].sum())
    with pytest.raises(ValueError, match="takes an optimizer, not Linear"):
        bagua.contrib.fuse_optimizer(nn.Linear(1, 1))


class Plain(torch.optim.SGD):
    """Another class, the same steps."""


class Own(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad


class OwnBelow(Own):
    pass


@pytest.mark.parametrize("kind", [Plain, Own, OwnBelow])
@pytest.mark.parametrize("before", [False, True], ids=["", "another before"])
def test_a_step_of_a_subclass_stays_as_it_is(bagua, kind, before):
    if before:  # torch wraps a class's step when its first object is made
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    param = nn.Parameter(torch.ones(3))
    optimizer = kind([param], lr=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bagua.contrib.fuse_optimizer(optimizer)
    told = [each for each in caught if "as before" in str(each.message)]
    assert len(told) == (kind is not Plain)
    assert bagua.contrib.fuse.is_fused_optimizer(optimizer) == (kind is Plain)
    assert bool(optimizer.param_groups[0]["fused"]) == (kind is Plain)
    param.grad = torch.ones(3)
    optimizer.fuse_step()
    assert param.tolist() == [0.5] * 3
