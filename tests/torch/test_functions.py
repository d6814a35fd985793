"""The same start for all ranks: parameters, optimizer state, objects."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

pytestmark = pytest.mark.ranks(1, 2, 3)


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))


def built(seed):
    model = make_model(seed)
    model(torch.randn(2, 3, 5, 5))
    return model


def same(state, expected):
    assert state.keys() == expected.keys()
    for key in expected:
        assert torch.equal(state[key], expected[key]), key


@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "list"])
def test_parameters(everyone, hvd, form):
    for root in everyone.ranks:
        model, expected = built(everyone.me), built(root).state_dict()
        if form == "state_dict":
            hvd.broadcast_parameters(model.state_dict(), root)
            same(model.state_dict(), expected)
            continue
        named = model.named_parameters()
        hvd.broadcast_parameters(named if form == "named_parameters" else list(named), root)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name])
            assert parameter.requires_grad


def test_parameters_with_gaps_ties_and_what_is_no_tensor(everyone, hvd):
    shared = torch.full((4, 4), float(everyone.me))
    state = {
        "tied": shared,
        "again": shared,
        "transposed": torch.arange(6.0).view(2, 3).t() + everyone.me,
        "channels_last": torch.full((2, 3, 4, 4), float(everyone.me)).to(
            memory_format=torch.channels_last
        ),
        "empty": torch.empty(0, 3),
        "bfloat16": torch.full((3,), everyone.me, dtype=torch.bfloat16),
        "count": torch.tensor(everyone.me),
        "none": None,
        "_extra_state": {"rank": everyone.me},
    }
    before = hvd.counters()["exchanges"]
    hvd.broadcast_parameters(state, 0)
    assert hvd.counters()["exchanges"] == before + 2  # of names, too
    for key in ("tied", "channels_last", "bfloat16", "count"):
        assert (state[key] == 0).all(), key
    assert state["again"] is shared
    assert torch.equal(state["transposed"], torch.arange(6.0).view(2, 3).t())
    assert state["_extra_state"] == {"rank": everyone.me}


def test_names_of_one_tensor_in_any_order(everyone, hvd):
    shared, other = torch.full((3,), float(everyone.me)), torch.full((2,), float(everyone.me))
    named = [("b", shared), ("a", other), ("c", shared), ("d", shared)]
    hvd.broadcast_parameters(named[everyone.me :] + named[: everyone.me], 0)
    assert shared.tolist() == [0.0] * 3
    assert other.tolist() == [0.0] * 2


def test_parameters_of_the_wrong_form(hvd):
    with pytest.raises(ValueError, match="named_parameters"):
        hvd.broadcast_parameters(nn.Linear(2, 2).parameters(), 0)
    with pytest.raises(hvd.UsageError, match=r"takes model\.state_dict\(\), not None"):
        hvd.broadcast_parameters(None, 0)
    hvd.broadcast_parameters({}, 0)
    with pytest.raises(hvd.UsageError, match="takes the optimizer, not a dict"):
        hvd.broadcast_optimizer_state({}, 0)


@pytest.mark.parametrize("form", ["dict", "list"])
def test_parameters_are_known_by_name(everyone, hvd, form):
    def given(names):
        pairs = [(name, torch.tensor([ord(name), everyone.me])) for name in names]
        return dict(pairs), dict(pairs) if form == "dict" else pairs

    mine, params = given("abc" if everyone.me == 0 else "cba")
    hvd.broadcast_parameters(params, 0)
    assert {name: tensor.tolist() for name, tensor in mine.items()} == {
        name: [ord(name), 0] for name in "abc"
    }


@pytest.mark.ranks(2, 3)
def test_parameters_of_other_names(everyone, hvd):
    last = everyone.size - 1
    params = {
        name: torch.full((2,), everyone.me) for name in ("ab" if everyone.me < last else "ax")
    }
    words = f"parameters differ between ranks: rank 0 alone has b; rank {last} alone has x"
    with pytest.raises(hvd.UsageError, match=words):
        hvd.broadcast_parameters(params, 0)
    assert all((tensor == everyone.me).all() for tensor in params.values())


@pytest.mark.ranks(2, 3)
def test_parameters_of_other_shapes(everyone, hvd):
    last = everyone.size - 1
    params = {"a": torch.zeros(3), "b": torch.zeros(2, 4 + (everyone.me == last))}
    words = (
        rf"'b', 'float32', \(2, 4\)\) on rank 0, .*\(2, 5\)\) on rank {last} \(name, dtype, shape\)"
    )
    with pytest.raises(hvd.UsageError, match=words):
        hvd.broadcast_parameters(params, 0)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, betas=(0.8, 0.9)),
    "tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, history_size=2),
    "groups": lambda params: torch.optim.AdamW([{"params": [p]} for p in params], lr=0.1),
}


def trained(kind, steps, dtype=torch.float32):
    torch.manual_seed(steps)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3, dtype=dtype)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * (steps + 1)
    return model, optimizer


def plain(value):
    """Something that can be compared with ==, bit for bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("who_has_state", ["root", "others", "all"])
def test_optimizer_state(everyone, hvd, kind, who_has_state):
    root = everyone.size - 1
    steps = {
        "root": lambda rank: 3 * (rank == root),
        "others": lambda rank: 2 * (rank != root),
        "all": lambda rank: rank + 1,
    }[who_has_state]
    model, optimizer = trained(kind, steps(everyone.me))
    _, expected = trained(kind, steps(root))
    parameters = copy.deepcopy(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root)
    assert plain(optimizer.state_dict()) == plain(expected.state_dict())
    same(model.state_dict(), parameters)  # no step was made on the way


def test_optimizer_state_keeps_its_element_type(everyone, hvd):
    def make(rank):
        model, optimizer = trained("momentum", 0, torch.bfloat16)
        for param in model.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.full(param.shape, 0.1 + rank)
        return optimizer

    optimizer = make(everyone.me)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert plain(optimizer.state_dict()) == plain(make(0).state_dict())


def test_optimizer_state_of_a_distributed_optimizer(everyone, hvd):
    model, optimizer = trained("adam", everyone.me + 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(distributed, 0)
    _, expected = trained("adam", 1)
    assert plain(optimizer.state_dict()) == plain(expected.state_dict())
    model(torch.ones(1, 3)).sum().backward()
    distributed.step()
    for parameter in model.parameters():
        assert_close(hvd.allreduce(parameter.detach()), parameter.detach())


@pytest.mark.ranks(2)
def test_optimizers_with_different_parameters(everyone, hvd):
    optimizer = torch.optim.SGD([torch.ones(2 + everyone.me)], lr=1.0)
    with pytest.raises(hvd.UsageError, match=r"\(2,\).* on rank 0, .*\(3,\).* on rank 1"):
        hvd.broadcast_optimizer_state(optimizer, 0)


def test_parameters_in_fewer_exchanges_than_tensors(everyone, hvd):
    state = {f"p{i}": torch.full((10,), float(i + everyone.me)) for i in range(100)}
    before = hvd.counters()["exchanges"]
    hvd.broadcast_parameters(state, 0)
    assert hvd.counters()["exchanges"] - before < 10
    assert all((tensor == i).all() for i, tensor in enumerate(state.values()))
