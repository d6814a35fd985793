"""Ranks that were told different things hear so when they wrap their optimizers, all of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm, DiLoCo, TopK
from bagua.common.errors import UsageError
from bagua.common.world import world

pytestmark = pytest.mark.ranks(1, 2, 3)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))


def wrap(hvd, optimizer_of, **settings):
    model = layers()
    return hvd.DistributedOptimizer(
        optimizer_of(model.parameters()), model.named_parameters(), **settings
    )


def by_rank(rank: int):
    """As a function that reads a setting which one machine has and another has not."""
    return lambda name, shape: "bytegrad" if name.startswith(str(rank)) else None


def exact_by_rank(rank: int) -> Algorithm:
    return Algorithm(codec="minmax_u8", exact=lambda name, shape: name.startswith(str(rank)))


@dataclass(frozen=True)
class Plans(Algorithm):
    """With a setting in which no two of them differ, as far as one sees."""

    def plan(self, bucket, world, step):
        usual = super().plan(bucket, world, step)
        return replace(usual, **ODD_PLAN) if world.rank == world.size - 1 > 0 else usual


ODD_PLAN: dict[str, Any] = {}


def exact_in_a_class(rank: int) -> Algorithm:
    return Plans(codec="minmax_u8", exact=exact_by_rank(rank).exact)


def exact_by_an_object(rank: int) -> Algorithm:
    return Algorithm(codec="minmax_u8", exact=partial(begins_with, str(rank)))


def begins_with(text: str, name: str, shape: tuple[int, ...]) -> bool:
    return name.startswith(text)


@pytest.mark.parametrize("make", [by_rank, exact_by_rank, exact_in_a_class, exact_by_an_object])
def test_functions_that_choose_otherwise(everyone, hvd, make):
    sgd = partial(torch.optim.SGD, lr=0.1)
    wrap(hvd, sgd, algorithm=make(0))  # another function on every rank, which chooses alike
    last = everyone.me == everyone.size - 1
    if everyone.size == 1:
        return
    words = f"algorithms differ between ranks: 0.weight travels by .* on rank {everyone.size - 1}"
    with pytest.raises(hvd.UsageError, match=words):
        wrap(hvd, sgd, algorithm=make(int(last)))


@pytest.mark.parametrize(
    "change", [{"codec": "minmax_u8"}, {"codec": "topk", "density": 0.1}, {"low_rank": 2}]
)
def test_plans_that_depend_on_the_rank(everyone, hvd, monkeypatch, change):
    """Buckets, too, may differ by them, and then ranks would wait for each other's."""
    sgd, last = partial(torch.optim.SGD, lr=0.1), everyone.size - 1
    optimizer = wrap(hvd, sgd, algorithm=Plans())
    monkeypatch.setattr(f"{__name__}.ODD_PLAN", change)
    if everyone.size == 1:
        return
    (field, value), *_ = change.items()
    words = (
        "algorithms differ between ranks: 0.weight travels by .*Exchange\\(\\) on rank 0, "
        f"by .*Exchange\\({field}={value!r}.*\\) on rank {last}$"
    )
    for choose in (partial(wrap, hvd, sgd), optimizer.set_algorithm):
        with pytest.raises(hvd.UsageError, match=words):
            choose(algorithm=Plans(error_feedback=None))


@pytest.mark.parametrize("method", ["plan", "of"])
def test_a_rank_whose_own_algorithm_fails(everyone, hvd, monkeypatch, method):
    """As one that reads a file which is on one machine only."""

    def fails(*_: Any) -> Any:
        raise OSError("no such file")

    last = everyone.size - 1
    if everyone.me == last:
        monkeypatch.setattr(Plans, method, fails)
    words = (
        "no such file" if everyone.me == last else rf"Plans\(\) fails on rank {last}: OSError: no"
    )
    with pytest.raises(OSError if everyone.me == last else hvd.UsageError, match=words):
        wrap(hvd, partial(torch.optim.SGD, lr=0.1), algorithm=Plans())


def test_a_choice_that_is_wrong_on_one_rank(everyone, hvd):
    """Before it can be compared: it is no algorithm, or none for that optimizer."""
    last, params = everyone.size - 1, [nn.Parameter(torch.zeros(8))]
    with_momentum = torch.optim.SGD(params, lr=0.1, momentum=0.9 if everyone.me == last else 0.0)
    optimizer = hvd.DistributedOptimizer(with_momentum)
    whose = "" if everyone.me == last else rf"what is chosen fails on rank {last}: UsageError: "
    choices = {
        "unknown algorithm": "topk" if everyone.me < last else "topc",
        r"TopK\(.*\) has a momentum of its own": TopK(momentum_correction=0.9),
    }
    for words, choice in choices.items():
        with pytest.raises(hvd.UsageError, match=whose + ".*" + words):
            optimizer.set_algorithm(choice)
    assert optimizer.algorithm.name == "gradient_allreduce"
    named = [] if everyone.me == last else [("a", params[0])]
    with pytest.raises(hvd.UsageError, match=whose + "named_parameters lacks 1 of"):
        hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), named)


@dataclass(frozen=True)
class Later(Algorithm):
    """Whose plans are none from some step on."""

    since: int = 1

    def plan(self, bucket, world, step):
        return "raw" if step >= self.since else super().plan(bucket, world, step)


@dataclass(frozen=True)
class FailsOnOne(Algorithm):
    """On the last rank, for a bucket of several parameters, from step 1 on, in one of some ways."""

    how: str = "file"

    def plan(self, bucket, world, step):
        exchange = super().plan(bucket, world, step)
        if bucket.count <= 64 * 64 or step < 1 or world.rank < world.size - 1:
            return exchange
        if self.how == "file":
            raise OSError("no such file")
        return None if self.how == "nothing" else replace(exchange, density=7.0)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("file", OSError, "no such file"),
        ("nothing", UsageError, "FailsOnOne.plan returned None"),
        ("value", UsageError, "density is a share"),
    ],
    ids=["file", "nothing", "value"],
)
@pytest.mark.parametrize("what", ["grad", "weight", "later"])
def test_a_plan_that_fails_on_one_rank(everyone, hvd, how, error, words, what):
    """All hear so, and go on as they were."""
    model, oracle = layers(), layers()
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for p, q in zip(model.parameters(), oracle.parameters()):
        hvd.broadcast_(p.data, root_rank=0)
        q.data.copy_(p.data)
    sgd, fails = torch.optim.SGD(model.parameters(), lr=0.1), FailsOnOne(how=how)
    optimizer = hvd.DistributedOptimizer(
        sgd, algorithm=fails if what == "later" else "gradient_allreduce"
    )
    mine = everyone.me == everyone.size - 1
    if not mine:
        error, words = UsageError, rf"what is planned fails on rank {everyone.size - 1}: .*{words}"

    def steps(count: int) -> None:
        for _ in range(count):
            for each in (optimizer, reference):
                each.zero_grad()
            for net, scale in ((model, everyone.me + 1), (oracle, (everyone.size + 1) / 2)):
                (net(torch.ones(1, 64)) * scale).sum().backward()
            grads = zip(model.parameters(), oracle.parameters())
            assert all(
                torch.allclose(p.grad, q.grad, atol=1e-4) for p, q in grads
            )  # after backward
            reference.step()
            optimizer.step()

    if what == "later":  # where buckets are cut anew, by the order of the first step
        with pytest.raises(error, match=words):
            steps(1)
    else:
        steps(2)
        with pytest.raises(error, match=words):
            optimizer.set_algorithm(replace(fails, what=what))
        assert optimizer.algorithm.name == "gradient_allreduce"
    steps(2)


def test_a_change_that_is_refused_on_all_ranks(everyone, hvd):
    """Gradients are exchanged in backward as before, where one may clip them."""
    params = [nn.Parameter(torch.ones(4, dtype=torch.complex64)), nn.Parameter(torch.ones(4))]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        (sum(p.abs().sum() for p in params) * (everyone.me + 1)).backward()
        assert params[1].grad.tolist() == [(everyone.size + 1) / 2] * 4
        optimizer.step()
        with pytest.raises(hvd.UsageError, match="complex64 cannot be averaged between steps"):
            optimizer.set_algorithm("decentralized")


@dataclass(frozen=True)
class ThenLater(Algorithm):
    def at(self, step):
        return self if step < 2 else Later(codec="fp16")


def test_a_plan_that_is_wrong_on_all_ranks(everyone, hvd):
    """Each step says so, and nothing travels by another one."""
    optimizer = wrap(hvd, partial(torch.optim.SGD, lr=0.1), algorithm=ThenLater())
    backward(optimizer)
    for _ in range(2):
        with pytest.raises(hvd.UsageError, match=r"Later.plan returned 'raw'; it must return"):
            backward(optimizer)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == everyone.size


@dataclass(frozen=True)
class ThenByRank(Algorithm):
    """From the third step on the last rank sends bytes, and others halves."""

    def at(self, step):
        is_last = world().rank == world().size - 1
        return self if step < 2 else Algorithm(codec="minmax_u8" if is_last else "fp16")


def test_ranks_that_change_to_different_algorithms(everyone, hvd):
    """Each step says so, on all ranks."""
    last = everyone.size - 1
    optimizer = wrap(hvd, partial(torch.optim.SGD, lr=0.1), algorithm=ThenByRank())
    backward(optimizer)
    if last == 0:
        return backward(optimizer)
    words = (
        r"at\(\) changes to Algorithm\(codec='fp16'\) on rank 0, "
        rf"to Algorithm\(codec='minmax_u8'\) on rank {last}; it must say the same"
    )
    for _ in range(2):
        with pytest.raises(hvd.UsageError, match=words):
            backward(optimizer)


@dataclass(frozen=True)
class FirstByRank(Algorithm):
    """What only the rank itself uses, from the first step on."""

    def at(self, step):
        return DiLoCo(outer_lr=0.5 if world().rank == world().size - 1 else 0.7)


def test_ranks_that_begin_with_different_algorithms(everyone, hvd):
    last = everyone.size - 1
    sgd = partial(torch.optim.SGD, lr=0.1)
    if last == 0:
        return wrap(hvd, sgd, algorithm=FirstByRank())
    words = rf"at\(0\) of FirstByRank\(\) is DiLoCo\(\) on rank 0, .*outer_lr=0.5\) on rank {last}"
    with pytest.raises(hvd.UsageError, match=words):
        wrap(hvd, sgd, algorithm=FirstByRank())
    optimizer = wrap(hvd, sgd)
    with pytest.raises(hvd.UsageError, match=words):
        optimizer.set_algorithm(FirstByRank())
    backward(optimizer)


@dataclass(frozen=True)
class OuterByRank(Algorithm):
    def plan(self, bucket, world, step):
        return replace(super().plan(bucket, world, step), outer_lr=1 / (1 + world.rank))


@dataclass(frozen=True)
class ThenOuterByRank(Algorithm):
    def at(self, step):
        return self if step < 2 else OuterByRank(what="delta", every=2)


def test_ranks_whose_plans_differ_once_they_change(everyone, hvd):
    optimizer = wrap(hvd, partial(torch.optim.SGD, lr=0.1), algorithm=ThenOuterByRank())
    backward(optimizer)
    if everyone.size == 1:
        return backward(optimizer)
    with pytest.raises(hvd.UsageError, match=r"0.weight travels by .*outer_lr=0.5\) on rank 1"):
        backward(optimizer)


def test_parameters_that_come_where_no_plan_is_right(everyone, hvd):
    """They are not left out in silence."""
    model = layers()
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=Later(since=2))
    backward(optimizer, 2)
    words = r"Later.plan returned 'raw'; it must return"
    with pytest.raises(hvd.UsageError, match=words):
        optimizer.add_param_group({"params": list(model[1].parameters())})
    for _ in range(2):
        with pytest.raises(hvd.UsageError, match=words):
            backward(optimizer)


DIFFERENT = {
    "op": ({}, {"op": "Sum"}, "op differs between ranks: Average on rank 0, Sum on rank"),
    "compression": (
        {},
        {"compression": "fp16"},
        "compression differs between ranks: None on rank 0",
    ),
    "groups": ({"num_groups": 1}, {"num_groups": 2}, "num_groups differs between ranks: 1 on rank"),
    "sparse": ({}, {"sparse_as_dense": True}, "sparse_as_dense differs between ranks: False on"),
    "predivide": (
        {},
        {"gradient_predivide_factor": 2.0},
        "gradient_predivide_factor differs between ranks: 1.0 on rank 0, 2.0 on rank",
    ),
    "passes": (
        {},
        {"backward_passes_per_step": 2},
        "backward_passes_per_step differs between ranks: 1 on rank 0, 2 on rank",
    ),
}


@pytest.mark.parametrize("case", list(DIFFERENT))
def test_settings(everyone, hvd, case):
    usual, odd, words = DIFFERENT[case]
    settings = dict(odd if everyone.me == everyone.size - 1 else usual)
    if "op" in settings:
        settings["op"] = hvd.Sum
    if "compression" in settings:
        settings["compression"] = hvd.Compression.fp16
    sgd = partial(torch.optim.SGD, lr=0.1)
    if everyone.size == 1:
        wrap(hvd, sgd, **settings)
        return
    with pytest.raises(hvd.UsageError, match=words):
        wrap(hvd, sgd, **settings)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == everyone.size


def test_groups_of_equal_shapes(everyone, hvd):
    params = [nn.Parameter(torch.zeros(8)) for _ in range(4)]
    named = [(str(i), param) for i, param in enumerate(params)]
    odd = everyone.me > 0 and everyone.me == everyone.size - 1
    a, b, c, d = (params[i] for i in ([0, 2, 1, 3] if odd else range(4)))
    sgd = torch.optim.SGD(params, lr=0.1)
    if everyone.size == 1:
        hvd.DistributedOptimizer(sgd, named, groups=[[a, b], [c, d]])
        return
    words = rf"groups\[0\] differs between ranks: 0, 1 on rank 0, 0, 2 on rank {everyone.size - 1}"
    with pytest.raises(hvd.UsageError, match=words):
        hvd.DistributedOptimizer(sgd, named, groups=[[a, b], [c, d]])


def backward(optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        sum(p.sum() for group in optimizer.param_groups for p in group["params"]).backward()
        optimizer.step()


@pytest.mark.parametrize("broadcast", [False, True])
def test_the_rule_of_the_step(everyone, hvd, broadcast):
    """Where gradients travel it makes replicas drift; else each rank may have been meant to."""
    lr = 0.1 + (everyone.me == everyone.size - 1)
    for algorithm, told_so in {
        "gradient_allreduce": "will not stay equal",
        "decentralized": "unless each rank is meant to",
        "low_precision_decentralized": "unless each rank is meant to",
        "local_sgd": "unless each rank is meant to",
        "async_model_average": "unless each rank is meant to",
    }.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = wrap(hvd, partial(torch.optim.SGD, lr=lr), algorithm=algorithm)
            if broadcast:
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            backward(optimizer, 2)
            optimizer.settle()
        told = [text for w in caught if "lr differs between ranks" in (text := str(w.message))]
        odd = everyone.size > 1 and not broadcast
        assert len(told) == (odd and everyone.me == 0)
        assert all(f"0.1 on rank 0, 1.1 on rank {everyone.size - 1}" in text for text in told)
        assert all(told_so in text for text in told)


@pytest.mark.parametrize("warmup_steps", [1, 2])
@pytest.mark.filterwarnings("ignore:.*betas differs between ranks")
def test_the_rule_of_momentum(everyone, hvd, warmup_steps):
    beta = 0.9 - 0.1 * (everyone.me == everyone.size - 1)
    make = partial(hvd.QAdam, betas=(beta, 0.999), warmup_steps=warmup_steps)
    optimizer = wrap(hvd, make, algorithm="qadam")
    backward(optimizer, warmup_steps // 2)  # the last one ends with the change
    if everyone.size > 1:
        for _ in range(2):
            with pytest.raises(hvd.UsageError, match=r"the optimizer's betas differs between"):
                backward(optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    backward(optimizer, 4)
