"""Averages in the background, against one loop over all ranks that knows when each rank had them.

When that was is up to chance; what it does to the weights is not.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from bagua.algorithms import AsyncModelAverage

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = [(3, 700), (5,), (40, 41)]
STEPS = 40
INNER = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Replica:
    """One rank of a model that is pulled somewhere else on every rank and in every step."""

    def __init__(self, rank: int, inner: str) -> None:
        self.rank, self.steps = rank, 0
        generator = torch.Generator().manual_seed(99)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.optimizer = INNER[inner](self.params)

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(1000 * self.rank + self.steps)
        self.steps += 1
        self.optimizer.zero_grad()
        goals = [torch.randn(shape, generator=generator) for shape in SHAPES]
        (sum((p - goal).square().sum() for p, goal in zip(self.params, goals)) / 4).backward()

    def go_to(self, step: int) -> None:
        while self.steps < step:
            self.backward()
            self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.params]


@pytest.mark.parametrize("inner", list(INNER))
def test_is_what_one_loop_over_all_ranks_gives(everyone, hvd, inner):
    mine = Replica(everyone.me, inner)
    optimizer = hvd.DistributedOptimizer(
        mine.optimizer, algorithm=AsyncModelAverage(sync_interval_ms=0.0)
    )
    begun, used = [], []  # after how many steps each average was begun, and used
    driver = optimizer._driver
    start, finish = driver._start, driver._finish
    driver._start = lambda: (begun.append(mine.steps), start())
    driver._finish = lambda: (finish(), used.append(mine.steps))
    while mine.steps < STEPS or len(used) < 3:  # where cores are busy, an average takes its time
        mine.backward()
        optimizer.step()
        time.sleep(0.001 * everyone.me)  # ranks are not equally fast
    count, unsettled = len(used), mine.values()
    optimizer.settle()

    replicas = [Replica(rank, inner) for rank in everyone.ranks]
    steps, *events = zip(*hvd.allgather_object((mine.steps, begun, used)))
    events = list(zip(*events))
    counts = {len(times) for pair in events for times in pair}
    assert len(counts) == 1, "all ranks take part in every average"
    right = None
    for number in range(counts.pop()):
        given = []
        for replica, (starts, _) in zip(replicas, events):
            replica.go_to(starts[number])
            given.append(replica.values())
        means = [torch.stack(theirs).mean(0) for theirs in zip(*given)]
        for replica, (_, ends), own in zip(replicas, events, given):
            replica.go_to(ends[number])
            if number == count and replica.rank == everyone.me:
                right = replica.values()
            with torch.no_grad():
                for param, mean, before in zip(replica.params, means, own):
                    param += mean - before
    for replica, last in zip(replicas, steps):
        replica.go_to(last)
    for ours, theirs in zip(unsettled, right or replicas[everyone.me].values()):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for param, theirs in zip(mine.params, zip(*(replica.values() for replica in replicas))):
        mean = torch.stack(theirs).mean(0)
        torch.testing.assert_close(param.detach(), mean, rtol=1e-5, atol=1e-5)


SHARED = {
    "same": [slice(0, 700), slice(0, 700)],
    "head": [slice(0, 300), slice(0, 700)],
    "middle": [slice(0, 700), slice(200, 500)],
    "beyond": [slice(0, 400), slice(100, 700), slice(300, 600)],
    "by turns": [slice(0, 700, 2), slice(1, 700, 2)],
    "some twice": [slice(0, 700, 2), slice(0, 700, 3), slice(1, 700, 2)],
    "other storages": [slice(0, 400), slice(100, 700)],
}


@pytest.mark.parametrize("how", list(SHARED))
def test_memory_that_parameters_share_moves_once(everyone, hvd, how):
    whole = torch.zeros(700)
    parts = [whole[place] for place in SHARED[how]]
    if how == "other storages":
        parts = [torch.from_numpy(part.numpy()) for part in parts]
    params = [nn.Parameter(part) for part in parts]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.1), algorithm=AsyncModelAverage(sync_interval_ms=0.0)
    )
    optimizer.step()
    optimizer.settle()
    whole.fill_(everyone.me)
    driver, used = optimizer._driver, []
    finish = driver._finish
    driver._finish = lambda: (finish(), used.append(whole.tolist()))
    while not used:
        optimizer.step()
        time.sleep(0.001)
    assert used[0] == [(everyone.size - 1) / 2] * 700
    optimizer.settle()
