"""A `GradScaler` whose ranks see an overflow alike, or are told that they do not."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm, LocalSGD

pytestmark = pytest.mark.ranks(1, 2, 3)

BATCH = 4


def line() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


def batches(everyone, count: int) -> list[torch.Tensor]:
    """Of all ranks, one below the other."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH * everyone.size, 6, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def mine(everyone, rows: torch.Tensor) -> torch.Tensor:
    return rows[everyone.me * BATCH : (everyone.me + 1) * BATCH]


def new_scaler(scale: float = 1024.0):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)


def assert_close(model, oracle) -> None:
    for ours, right in zip(model.parameters(), oracle.parameters()):
        torch.testing.assert_close(ours, right)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("how", ["passes", "no_sync"])
@pytest.mark.parametrize("clips", [False, True])
def test_an_overflow_in_what_is_left_of_a_window(everyone, hvd, how, clips):
    """Three batches and two passes a step: before a step by one pass nothing is shared yet."""
    model, oracle = line(), line()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        backward_passes_per_step=2 if how == "passes" else 1,
    )
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    scaler, scales = new_scaler(), []
    for number, rows in enumerate(batches(everyone, 9)):
        epoch, batch = divmod(number, 3)
        bad = epoch == 1 and batch == 2
        waits = optimizer.no_sync() if how == "no_sync" and batch != 1 else contextlib.nullcontext()
        with waits:
            overflows = bad and everyone.me == everyone.size - 1
            loss = loss_of(model, mine(everyone, rows)) * (torch.inf if overflows else 1.0)
            scaler.scale(loss).backward()
        loss_of(oracle, rows).backward()
        if batch == 0:
            continue
        if clips:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not bad:
            reference.step()
        reference.zero_grad()
        scales.append(scaler.get_scale())
        assert_close(model, oracle)
    assert scales == [1024.0] * 3 + [512.0] * 3


def test_what_a_scaler_has_exchanged_is_not_exchanged_again(everyone, hvd):
    model = line()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2)
    (rows,) = batches(everyone, 1)
    for _ in range(2):  # until buckets are settled
        loss_of(model, mine(everyone, rows)).backward()
        optimizer.step()
    for skips in (True, False):
        optimizer.zero_grad()
        loss_of(model, mine(everyone, rows)).backward()
        counts = [hvd.counters()["exchanges"]]
        with optimizer.skip_synchronize() if skips else contextlib.nullcontext():
            assert not optimizer._step_supports_amp_scaling
            counts.append(hvd.counters()["exchanges"])
            optimizer.step()
        counts.append(hvd.counters()["exchanges"])
        assert counts[0] + (not skips) == counts[1] == counts[2]


@dataclass(frozen=True)
class First(Algorithm):
    """Weights for four steps, and then gradients."""

    def at(self, step: int) -> Algorithm:
        return LocalSGD(every=2) if step < 4 else Algorithm()


def train(everyone, optimizer, model, scaler, rows, *, bad=False, unscales=False):
    scaler.scale(loss_of(model, mine(everyone, rows)) * (torch.inf if bad else 1.0)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    try:
        scaler.step(optimizer)
    finally:
        scaler.update()


@pytest.mark.parametrize("unscales", [False, True])
def test_scalers_that_differ_when_gradients_begin_by_themselves(everyone, hvd, unscales):
    """It stays what it was until there are new ones, and then goes on as one that had none."""
    model, scaler = line(), new_scaler()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(adam, algorithm=First())
    refused = (
        pytest.raises(hvd.UsageError, match="make a new GradScaler on every rank")
        if everyone.size > 1
        else contextlib.nullcontext()
    )
    rows = batches(everyone, 8)
    for step in range(4):
        optimizer.zero_grad()
        bad = step == 2 and everyone.me == everyone.size - 1
        with refused if step == 3 else contextlib.nullcontext():
            train(everyone, optimizer, model, scaler, rows[step], bad=bad, unscales=unscales)
    for call in (optimizer.zero_grad, optimizer.synchronize):
        with refused:
            call()
    if everyone.size > 1:
        assert optimizer.state_dict()["bagua"]["step"] == 4, "that was taken"
    with refused:
        optimizer.set_algorithm("bytegrad")
    if everyone.size == 1:
        return
    optimizer.forget_scaler()
    scaler = new_scaler()
    optimizer.zero_grad()  # and change
    oracle = copy.deepcopy(model)
    reference = torch.optim.Adam(oracle.parameters(), lr=0.01)
    reference.load_state_dict(copy.deepcopy(adam.state_dict()))
    for step in range(4, 8):
        optimizer.zero_grad()
        train(everyone, optimizer, model, scaler, rows[step], unscales=unscales)
        reference.zero_grad()
        loss_of(oracle, rows[step]).backward()
        reference.step()
        assert_close(model, oracle)
    theirs = hvd.allgather_object([param.detach() for param in model.parameters()])
    assert all(torch.equal(a, b) for params in theirs for a, b in zip(params, theirs[0]))
    optimizer.set_algorithm("local_sgd")  # for which a scaler leaves word in the optimizer
    optimizer.zero_grad()
    train(everyone, optimizer, model, scaler, rows[0], unscales=unscales)


# By whether it is the last rank: the steps that overflow.
OVERFLOWS = {
    "nowhere": ((), ()),
    "alike": ((1, 3), (1, 3)),
    "on one": ((), (2,)),
    "equal scales": ((1,), (3,)),
    "equal sums of steps": ((0, 3), (1, 2)),
    "equal sums of squares": ((0, 7), (3, 6)),
}


@pytest.mark.parametrize("case", [*OVERFLOWS, "scales that began unlike"])
def test_scalers_are_compared_each_time(everyone, hvd, case):
    model, last = line(), everyone.me == everyone.size - 1
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=LocalSGD(every=2))
    scaler = new_scaler(512.0 if case == "scales that began unlike" and last else 1024.0)
    for step, rows in enumerate(batches(everyone, 9)):
        optimizer.zero_grad()
        bad = step in OVERFLOWS.get(case, ((), ()))[last]
        train(everyone, optimizer, model, scaler, rows, bad=bad)
    if everyone.size > 1 and case not in ("nowhere", "alike"):
        for _ in range(3):
            with pytest.raises(hvd.UsageError, match="GradScalers of the ranks differ"):
                optimizer.set_algorithm("gradient_allreduce")
            assert optimizer.algorithm == LocalSGD(every=2)
        optimizer.forget_scaler()
    optimizer.set_algorithm("gradient_allreduce")
    assert optimizer.algorithm.what == "grad"
