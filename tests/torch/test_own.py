"""Parameters that no other rank has a replica of: as if they were no part of what is exchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua import algorithms
from bagua.torch.own import is_own, keep_own
from bagua.torch.safety import ReplicasDifferError, check_replicas

pytestmark = pytest.mark.ranks(1, 2, 3)

NAMES = [name for name in algorithms.names() if name != "async_model_average"]


def parameters(everyone, with_own=True):
    shared = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).clone())
    own = nn.Parameter(torch.full((5, 2), float(everyone.me + 1)))
    last = nn.Parameter(torch.ones(7))
    keep_own([own])
    return [shared, own, last] if with_own else [shared, last]


def train(everyone, optimizer, params, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + everyone.me)
        loss = 0
        for param in params:
            if is_own(param):  # another number of draws must not matter to the others
                loss = loss + (param * (everyone.me + step + 1)).sum()
            else:
                loss = loss + (param * torch.randn(param.shape, generator=generator)).sum()
        loss.backward()
        optimizer.step()


def optimizer_of(hvd, name, params):
    if name == "qadam":
        return hvd.QAdam(params, lr=0.1, warmup_steps=2)
    return torch.optim.SGD(params, lr=0.1, weight_decay=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_others_train_as_without_it_and_it_trains_alone(everyone, hvd, name):
    """To the last bit, by every algorithm."""
    params, others = parameters(everyone), parameters(everyone, with_own=False)
    alone = parameters(everyone)[1]
    for trained in (params, others):
        inner = optimizer_of(hvd, name, trained)
        optimizer = hvd.DistributedOptimizer(inner, algorithm=name)
        train(everyone, optimizer, trained)
        optimizer.settle()
    train(everyone, optimizer_of(hvd, name, [alone]), [alone])
    assert torch.equal(params[0], others[0])
    assert torch.equal(params[2], others[1])
    assert torch.equal(params[1], alone)


def test_momentum_that_does_not_travel_needs_no_frozen_variance(everyone, hvd):
    """An expert may see its first row after the warm-up."""
    params = parameters(everyone)
    optimizer = hvd.QAdam(params, lr=0.1, warmup_steps=1)
    plain = torch.optim.Adam([parameters(everyone)[1]], lr=0.1)
    own, oracle = params[1], plain.param_groups[0]["params"][0]
    optimizer = hvd.DistributedOptimizer(optimizer, algorithm="qadam")
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        factor = everyone.me * step
        sum((param * (1 if param is not own else factor)).sum() for param in params).backward()
        (oracle * factor).sum().backward()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(own, oracle)


def test_broadcasts_leave_it_alone(everyone, hvd):
    params = parameters(everyone)
    with torch.no_grad():
        for param in params:
            param.fill_(everyone.me + 1)
    optimizer = torch.optim.Adam(params, lr=0.1 * (everyone.me + 1))
    if everyone.me != everyone.size - 1:  # the last one has no state yet
        for param in params:
            param.grad = torch.full_like(param, float(everyone.me + 1))
        optimizer.step()
    expected = params[1].detach().clone()
    state = {key: value.clone() for key, value in optimizer.state.get(params[1], {}).items()}
    hvd.broadcast_parameters([(str(i), param) for i, param in enumerate(params)])
    hvd.broadcast_optimizer_state(optimizer)
    assert torch.equal(params[1], expected)
    kept = optimizer.state.get(params[1], {})
    assert list(kept) == list(state)
    assert all(torch.equal(kept[key], state[key]) for key in state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    if everyone.size > 1:
        assert params[0][0, 0].item() == pytest.approx(0.9)  # rank 0's first step
        assert optimizer.state[params[0]]["exp_avg"][0, 0].item() == pytest.approx(0.1)
        train(everyone, optimizer, params, 1)


@pytest.mark.parametrize("moved", [False, True], ids=["", "moved"])
def test_a_state_dict_is_broadcast_without_it(everyone, hvd, moved):
    """Its tensors are others than the model's, in the same memory, wherever that is by now."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(everyone.me + 1)
    keep_own([model[0].weight, model[1].running_mean])
    if moved:
        model[0].weight.data = model[0].weight.data.clone()
    hvd.broadcast_parameters(model.state_dict())
    for name, tensor in model.state_dict().items():
        own = name in ("0.weight", "1.running_mean")
        assert (tensor == (everyone.me + 1 if own else 1)).all(), name


def test_memory_that_was_its_own_is_anybodys_when_it_is_gone(everyone, hvd):
    """Whatever torch has put there since."""
    own = torch.full((1000,), float(everyone.me))
    keep_own([own])
    place = own.data_ptr()
    del own
    others = [torch.full((1000,), float(everyone.me)) for _ in range(50)]
    again = [other.data_ptr() == place for other in others]
    hvd.broadcast_parameters([(str(i), other) for i, other in enumerate(others)])
    assert all((other == 0).all() for other in others), again


def test_replicas_are_compared_without_it(everyone, hvd):
    params = parameters(everyone)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    named = optimizer._driver.named()
    assert [id(param) for _, param in named] == [id(params[0]), id(params[2])]
    check_replicas(named, "own", hvd.global_process_set)
    if everyone.size > 1:
        with pytest.raises(ReplicasDifferError):
            check_replicas([("own", params[1])], "differs", hvd.global_process_set)


def test_nothing_else_but_own(everyone, hvd):
    own = parameters(everyone)[1]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0))
    own.sum().backward()
    optimizer.step()
    assert own[0, 0] == everyone.me
