"""Ranks train on together after some had fewer batches than others, and joined."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import nn

from bagua.algorithms import (
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    LocalSGD,
    PowerSGD,
    QAdam,
    TopK,
)
from bagua.common.world import world

pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture
def setting(monkeypatch, hvd):
    def change(**settings):
        monkeypatch.setattr(world(), "config", dataclasses.replace(world().config, **settings))

    return change


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def optimizer_of(hvd, model, algorithm):
    if algorithm.what == "momentum":
        return hvd.DistributedOptimizer(
            hvd.QAdam(model.parameters(), warmup_steps=5), algorithm=algorithm
        )
    momentum = 0.0 if algorithm.momentum_correction else 0.9
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)


def inputs_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def train(model, optimizer, rank: int, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(inputs_of(rank, step)).square().mean().backward()
        optimizer.step()


def meet(hvd, model, optimizer) -> None:
    """As the docs say."""
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)


def spread(hvd, model) -> float:
    """The largest difference between ranks."""
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    return float((hvd.allreduce(flat, op=hvd.Max) - hvd.allreduce(flat, op=hvd.Min)).max())


ALGORITHMS = [
    Algorithm(),
    TopK(density=0.1, hierarchical=False),
    PowerSGD(low_rank=2, warmup_steps=0),
    QAdam(warmup_steps=5),
    LocalSGD(every=3),
    DiLoCo(every=3),
    DiLoCo(every=2, when="forward"),
    Decentralized(peers="shift_one", hierarchical=False),
    Algorithm(codec="minmax_u8", warmup_steps=4),
]


@pytest.mark.parametrize("short", [0, 2], ids="the shorter ones have {} batches".format)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_all_train_on(everyone, hvd, algorithm, short):
    model = model_of()
    optimizer = optimizer_of(hvd, model, algorithm)
    for epoch in range(3):
        longest = epoch % everyone.size  # another rank's turn each time
        steps = 6 if everyone.me == longest else short
        train(model, optimizer, everyone.me, range(20 * epoch, 20 * epoch + steps))
        meet(hvd, model, optimizer)
        assert spread(hvd, model) == 0
        train(model, optimizer, everyone.me, range(20 * epoch + 10, 20 * epoch + 13))
    optimizer.settle()
    assert spread(hvd, model) == 0
    numbers = hvd.allgather_object(optimizer.progress)
    assert numbers == [numbers[0]] * everyone.size


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "algorithm",
    [
        TopK(density=0.1, hierarchical=False),
        Decentralized(every=3),
        Decentralized(every=2, peers="shift_one", hierarchical=False),
        Decentralized(every=3, when="step"),
        LocalSGD(every=2),
        LocalSGD(every=2, warmup_steps=4),
        DiLoCo(every=2, when="forward"),
    ],
    ids=repr,
)
def test_epochs_of_any_lengths(everyone, hvd, algorithm, seed):
    """Any rank may have no batch at all, and who has most may settle before the others are back."""
    lengths = random.Random(seed)
    model = model_of()
    optimizer = optimizer_of(hvd, model, algorithm)
    for epoch in range(6):
        batches = [lengths.choice([0, 1, 2, 3, 5]) for _ in range(everyone.size)]
        settles = lengths.random() < 0.3 and batches.count(max(batches)) == 1
        mine = batches[everyone.me]
        train(model, optimizer, everyone.me, range(20 * epoch, 20 * epoch + mine))
        if settles and mine == max(batches) and algorithm.what != "grad":
            optimizer.settle()
        meet(hvd, model, optimizer)
        assert spread(hvd, model) == 0
    train(model, optimizer, everyone.me, range(200, 207))
    if algorithm.what == "delta" and algorithm.when == "step":
        rest = -optimizer.progress[0] % algorithm.every
        train(model, optimizer, everyone.me, range(207, 207 + rest))
        assert spread(hvd, model) == 0  # a round is over
    optimizer.settle()
    assert spread(hvd, model) == 0
    numbers = hvd.allgather_object(optimizer.progress)
    assert numbers == [numbers[0]] * everyone.size


@pytest.mark.parametrize("warmup_steps", [0, 4, 5, 6, 9])
def test_each_steps_by_itself_from_somewhere_around_the_end(everyone, hvd, warmup_steps):
    """Of a warm-up, in which steps were everybody's: who had fewer is where the others are."""
    model = model_of()
    background = AsyncModelAverage(sync_interval_ms=0.0, warmup_steps=warmup_steps)
    optimizer = optimizer_of(hvd, model, background)
    begin = 0
    for epoch in range(4):
        shorter = (everyone.me + epoch) % 2 == 0
        batches = 0 if shorter and epoch == 0 and warmup_steps == 0 else 5 - shorter
        train(model, optimizer, everyone.me, range(begin, begin + batches))
        if epoch % 2:
            meet(hvd, model, optimizer)
        else:
            hvd.join()
        begin += 5
    optimizer.settle()
    assert spread(hvd, model) == 0
    assert all(param.isfinite().all() for param in model.parameters())


def test_a_rank_misses_the_exact_average_that_the_others_begin_a_round_from(everyone, hvd):
    model = model_of()
    optimizer = optimizer_of(hvd, model, LocalSGD(every=2))
    train(model, optimizer, everyone.me, range(5 if everyone.me else 4))
    if everyone.me:
        optimizer.settle()
    meet(hvd, model, optimizer)
    train(model, optimizer, everyone.me, range(10, 11))
    assert spread(hvd, model) == 0  # a round is over


def test_the_join_of_numpy_is_the_same_one(everyone, hvd):
    import bagua  # MPI has begun by now

    last = everyone.size - 1
    model = model_of()
    optimizer = optimizer_of(hvd, model, LocalSGD(every=2))
    train(model, optimizer, everyone.me, range(5 if everyone.me == last else 2))
    assert bagua.join() == last
    assert optimizer.progress == (5, 0, 0)  # of the last one, which has begun anew
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    train(model, optimizer, everyone.me, range(10, 15))
    assert optimizer.progress[0] == 10
    assert spread(hvd, model) == 0  # a round is over


@pytest.mark.parametrize("batches", [(3, 4), (9, 10), (0, 7)], ids=str)
def test_replicas_are_compared_at_the_same_steps_again(everyone, hvd, setting, batches):
    setting(check_replicas_every=5)
    model = model_of()
    optimizer = optimizer_of(hvd, model, Algorithm())
    train(model, optimizer, everyone.me, range(batches[everyone.me == 0]))
    meet(hvd, model, optimizer)
    train(model, optimizer, everyone.me, range(20, 32))
    assert spread(hvd, model) == 0


def test_a_rank_without_a_batch_is_where_the_others_are(everyone, hvd):
    """Its gradients count from the next step on, exactly."""
    model, oracle = model_of(), model_of()
    optimizer = optimizer_of(hvd, model, Algorithm())
    reference = torch.optim.SGD(oracle.parameters(), lr=0.05, momentum=0.9)
    busy = range(1, everyone.size)
    train(model, optimizer, everyone.me, range(4 if everyone.me in busy else 0))
    meet(hvd, model, optimizer)
    train(model, optimizer, everyone.me, range(4, 8))
    for step in range(8):
        reference.zero_grad()
        for rank in busy if step < 4 else range(everyone.size):
            loss = oracle(inputs_of(rank, step)).square().mean()
            (loss / everyone.size).backward()
        reference.step()
    for ours, right in zip(model.parameters(), oracle.parameters()):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", [Decentralized(peers="shift_one", hierarchical=False)])
def test_what_is_laid_out_anew_later_meets_the_same_peers(everyone, hvd, algorithm):
    model = model_of()
    optimizer = optimizer_of(hvd, model, algorithm)
    train(model, optimizer, everyone.me, range(4 if everyone.me == 0 else 3))
    meet(hvd, model, optimizer)
    model[0].weight.requires_grad_(False)
    train(model, optimizer, everyone.me, range(10, 13))
    optimizer.settle()
    assert spread(hvd, model) == 0


@pytest.mark.ranks(3, 4)  # two have no smaller set
def test_optimizers_of_other_ranks_are_left_alone(everyone, hvd):
    pair = hvd.add_process_set([0, 1])
    if everyone.me in pair.ranks:
        model = model_of()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(sgd, process_set=pair)
        train(model, optimizer, everyone.me, range(2))
    hvd.join()
    if everyone.me in pair.ranks:
        train(model, optimizer, everyone.me, range(2 + everyone.me))
        assert hvd.join(process_set=pair) == 1
        assert optimizer.progress[0] == 5
    hvd.remove_process_set(pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_the_exact_average_is_that_of_the_others(hvd, dtype, default):
    """Whose weights are zeros meanwhile. Parameters may share memory."""
    weights = nn.Parameter(torch.full((4,), 3.0, dtype=dtype))
    sgd = torch.optim.SGD([weights, nn.Parameter(weights.data)], lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=LocalSGD())
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        if hvd.rank() < hvd.size() - 1:
            optimizer.settle()
        hvd.join()
    finally:
        torch.set_default_dtype(before)
    assert weights.tolist() == [3.0] * 4
