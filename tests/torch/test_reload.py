"""Checkpoints loaded into an optimizer that has trained: nothing of that is left.

And what is laid out anew while training goes on, of which everything is left.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm, DiLoCo, LocalSGD, TopK, find, names
from bagua.common.errors import UsageError

pytestmark = pytest.mark.ranks(1, 2, 3)

SHORT = {"diloco": {"every": 2}, "local_sgd": {"every": 2}, "powersgd": {"warmup_steps": 1}}
# When averages arrive in the background is chance.
ALGORITHMS = {
    name: dataclasses.replace(find(name), hierarchical=False, **SHORT.get(name, {}))
    for name in names()
    if name not in ("async_model_average", "qadam")
} | {
    "sign1": Algorithm(codec="sign1"),
    "velocities": TopK(momentum_correction=0.5, density=0.1, hierarchical=False),
    "local_sgd, sign1": LocalSGD(every=2, codec="sign1"),
    "diloco, forward": DiLoCo(every=2, when="forward"),
    "diloco, topk, late": DiLoCo(every=2, codec="topk", warmup_steps=3),
}


@pytest.fixture(params=list(ALGORITHMS))
def algorithm(request):
    return ALGORITHMS[request.param]


def made(hvd, algorithm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))
    momentum = 0.0 if algorithm.momentum_correction else 0.5
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)


def train(hvd, model, optimizer, steps) -> None:
    for step in steps:
        rows = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(4, 20, generator=rows)).square().mean().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:what the algorithm had kept cannot be taken up")
@pytest.mark.parametrize("saved_at", [0, 3])
@pytest.mark.parametrize("whose", ["everyone's", "the first's"])
def test_it_goes_on_like_a_new_one(everyone, hvd, algorithm, whose, saved_at):
    model, optimizer = made(hvd, algorithm)
    train(hvd, model, optimizer, range(saved_at))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if whose == "the first's":
        saved = hvd.broadcast_object(saved)

    def gone_on(model, optimizer) -> torch.Tensor:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        train(hvd, model, optimizer, range(saved_at, saved_at + 5))
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    train(hvd, model, optimizer, range(50, 57))
    again, new = gone_on(model, optimizer), gone_on(*made(hvd, algorithm))
    if algorithm.warmup_steps > saved_at:  # back there weights become their mean, of equal ones
        torch.testing.assert_close(again, new, rtol=0, atol=1e-6)
    else:
        assert torch.equal(again, new)


@pytest.mark.ranks(2, 3)
def test_who_has_loaded_is_told(everyone, hvd):
    model, trained = made(hvd, ALGORITHMS["topk"])
    train(hvd, model, trained, range(3))
    model, optimizer = made(hvd, ALGORITHMS["topk"])
    if everyone.me == 0:
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with pytest.warns(match="begins anew.*: only rank 0 loaded it"):
        train(hvd, model, optimizer, range(3, 5))


def saved_after(hvd, algorithm, steps):
    """Checkpoints of a run: before the first step, after one, ..."""
    model, optimizer = made(hvd, algorithm)
    saved = [copy.deepcopy((model.state_dict(), optimizer.state_dict()))]
    for step in range(steps):
        train(hvd, model, optimizer, [step])
        saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    return saved


def assert_equal(hvd, model) -> None:
    everyones = hvd.allgather_object(model.state_dict())
    for name, value in model.state_dict().items():
        assert all(torch.equal(theirs[name], value) for theirs in everyones)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["local_sgd", "diloco, topk, late", "powersgd"])
@pytest.mark.parametrize(
    ("steps", "mends"), [((1, 2), "loads"), ((2, 4), "broadcasts"), ((0, 5), "broadcasts")]
)
def test_checkpoints_of_different_steps_are_an_error(everyone, hvd, name, steps, mends):
    """Rounds would end at other times, or the algorithm change: ranks would wait for each other."""
    saved = saved_after(hvd, ALGORITHMS[name], 5)
    model, optimizer = made(hvd, ALGORITHMS[name])

    def load(step: int) -> None:
        model.load_state_dict(saved[step][0])
        optimizer.load_state_dict(copy.deepcopy(saved[step][1]))

    mine = steps[0 if everyone.me == 0 else 1]
    if mine:  # else this rank loads none
        load(mine)
    others = "rank 1" if everyone.size == 2 else "ranks 1, 2"
    for _ in range(2):
        with pytest.raises(UsageError, match="ranks go on from different steps") as caught:
            train(hvd, model, optimizer, [3])
        assert f": after {steps[0]} on rank 0; after {steps[1]} on {others}. " in str(caught.value)
    if mends == "loads":
        load(4)
    else:
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="what the algorithm had kept cannot")
        train(hvd, model, optimizer, range(5, 11))
    optimizer.settle()
    assert_equal(hvd, model)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "topk"])
def test_where_nothing_goes_by_steps_they_may_differ(everyone, hvd, name):
    saved = saved_after(hvd, ALGORITHMS[name], 3)
    model, optimizer = made(hvd, ALGORITHMS[name])
    if everyone.me == 0:
        model.load_state_dict(saved[3][0])
        optimizer.load_state_dict(saved[3][1])
    hvd.broadcast_parameters(model.state_dict(), 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(hvd, model, optimizer, range(3, 6))
    told = [str(w.message) for w in caught]
    assert any("begins anew: only rank 0 loaded it" in text for text in told) == (name == "topk")


@pytest.mark.parametrize("step", [5, 6])
def test_momentum_of_rounds_outlives_a_change_of_parameters(everyone, hvd, step):
    """Of those that stay: what encoding lost, too."""
    algorithm = DiLoCo(every=2, codec="minmax_u4", error_feedback=True, exact=[])
    model, optimizer = made(hvd, algorithm)
    model[0].bias.requires_grad_(False)
    train(hvd, model, optimizer, range(step))
    values = copy.deepcopy(optimizer.state_dict()["bagua"]["kept"]["values"])
    model[0].bias.requires_grad_(True)
    optimizer.zero_grad()
    optimizer.synchronize()
    after = optimizer.state_dict()["bagua"]["kept"]["values"]
    for what in ("momentum", "kept.0"):
        assert any(value.any() for value in values[what].values()) or everyone.size == 1
        for name, value in values[what].items():
            assert torch.equal(after[what][name], value)
        assert not after[what]["0.bias"].any()  # which is new
    train(hvd, model, optimizer, range(step, 12))
    for theirs in hvd.allgather_object(model.state_dict()):
        for name, value in model.state_dict().items():
            assert torch.equal(theirs[name], value)


@pytest.mark.ranks(2, 3)
def test_ranks_that_have_not_all_loaded_share_one_momentum(everyone, hvd):
    model, optimizer = made(hvd, DiLoCo(every=2))
    train(hvd, model, optimizer, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    momentum = saved[1]["bagua"]["kept"]["values"]["momentum"]
    own = saved[1]["bagua"]
    if everyone.me:
        own["kept"] = None
    optimizer.load_state_dict(saved[1])
    with pytest.warns(UserWarning, match="begins anew, from the first rank's weights and momentum"):
        optimizer.synchronize()
    after = optimizer.state_dict()["bagua"]["kept"]["values"]["momentum"]
    assert all(torch.equal(after[name], value) for name, value in momentum.items())
