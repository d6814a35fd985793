"""Random courses of training: wherever gradients travel, replicas are equal in every bit.

All ranks draw the same program. What it does to one rank alone is a NaN in its batch.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings

import pytest
import torch
from torch import nn

from bagua.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
    QAdam,
    TopK,
)
from bagua.common.world import world

GRADIENTS = {
    "exact": Algorithm(),
    "bytes": ByteGrad(hierarchical=False),
    "bytes, errors": ByteGrad(hierarchical=False, error_feedback=True),
    "topk": TopK(hierarchical=False, density=0.1, warmup_steps=2),
    "powersgd": PowerSGD(warmup_steps=1),
}
WEIGHTS = {
    "ring": LowPrecisionDecentralized(hierarchical=False),
    "pairs": Decentralized(hierarchical=False),
    "pairs at once": Decentralized(hierarchical=False, when="step", peers="random", seed=3),
    "rounds": LocalSGD(every=2),
    "late rounds": LocalSGD(every=2, when="forward"),
    "outer": DiLoCo(every=2),
    "late outer": DiLoCo(every=2, when="forward", warmup_steps=2),
    "background": AsyncModelAverage(sync_interval_ms=0.0, warmup_steps=1),
}
INNER = {
    "momentum": lambda hvd, params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda hvd, params: torch.optim.Adam(params, lr=0.01),
    "qadam": lambda hvd, params: hvd.QAdam(params, lr=0.001, warmup_steps=3),
}
ACTIONS = ["step"] * 4 + ["freeze", "thaw", "resume", "switch", "settle", "nan", "nan", "twice"]


class WeightsFirst(Algorithm):
    def at(self, step: int) -> Algorithm:
        return WEIGHTS["pairs"] if step < 2 else GRADIENTS["bytes"]


GRADIENTS["weights first"] = WeightsFirst()
ALGORITHMS = {**GRADIENTS, **WEIGHTS, "qadam": QAdam(warmup_steps=3, hierarchical=False)}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(8, 64), (64, 64), (64, 3)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.layers.append(nn.LayerNorm(64))

    def forward(self, rows):
        first, second, last, norm = self.layers
        hidden = second(norm(first(rows)))
        return torch.cat([hidden, last(hidden)], 1)


class Program:
    """One course of training, and what it has done so far."""

    def __init__(self, everyone, hvd, seed: int) -> None:
        self.everyone, self.hvd = everyone, hvd
        self.random = random.Random(seed)
        self.inner = self.random.choice(list(INNER))
        self.choices = [*GRADIENTS, *WEIGHTS] + 10 * ["qadam"] * (self.inner == "qadam")
        self.log = [f"seed {seed}", self.inner]
        self.number = 0
        self.model = Network()
        self.wrap(self.drawn())

    def drawn(self) -> Algorithm:
        name = self.random.choice(self.choices)
        self.log.append(name)
        return ALGORITHMS[name]

    def wrap(self, algorithm: Algorithm) -> None:
        inner = INNER[self.inner](self.hvd, self.model.parameters())
        named = self.model.named_parameters()
        self.optimizer = self.hvd.DistributedOptimizer(inner, named, algorithm=algorithm)

    def run(self, length: int) -> None:
        self.step("step")  # in which all have gradients
        for _ in range(length):
            action = self.random.choice(ACTIONS)
            self.log.append(action)
            if action not in ("step", "nan", "twice"):
                getattr(self, action)()
            self.step(action)
        self.optimizer.settle()
        self.compare()

    def freeze(self) -> None:
        layer = self.random.choice(list(self.model.layers)).requires_grad_(False)
        layer.zero_grad()  # else its momentum goes on, which is of each rank where weights travel

    def thaw(self) -> None:
        self.model.requires_grad_(True)

    def switch(self) -> None:
        self.optimizer.set_algorithm(self.drawn())

    def settle(self) -> None:
        self.optimizer.settle()

    def resume(self) -> None:
        state = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        required = [param.requires_grad for param in self.model.parameters()]
        self.model = Network()
        for param, requires_grad in zip(self.model.parameters(), required):
            param.requires_grad_(requires_grad)
        self.wrap(self.optimizer.algorithm)
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

    def step(self, action: str) -> None:
        self.number += 1
        self.optimizer.zero_grad(set_to_none=self.random.random() < 0.5)
        generator = torch.Generator().manual_seed(100 * self.number + self.everyone.me)
        rows = torch.randn(3, 8, generator=generator)
        victim = self.random.randrange(self.everyone.size)
        if action == "nan" and self.everyone.me == victim:
            rows[0, 0] = float("nan")
        if action == "twice":
            with self.optimizer.no_sync():
                self.backward(rows + 1)
        self.backward(rows)
        self.optimizer.step()
        if self.optimizer._driver.algorithm.what in ("grad", "momentum"):
            self.compare()

    def backward(self, rows) -> None:
        loss = self.model(rows).square().mean()
        if loss.requires_grad:  # all may be frozen
            loss.backward()

    def compare(self) -> None:
        mine = {name: param.detach() for name, param in self.model.named_parameters()}
        spoilt = [name for name, value in mine.items() if not value.isfinite().all()]
        everyones = self.hvd.allgather_object((mine, spoilt))
        first, _ = everyones[0]
        unlike = {
            name for each, _ in everyones for name in each if not each[name].equal(first[name])
        }
        assert not unlike
        assert not any(names for _, names in everyones)


def run(everyone, hvd, seeds, monkeypatch) -> None:
    config = dataclasses.replace(world().config, bucket_mb=0.02, check_finite="skip")
    monkeypatch.setattr(world(), "config", config)
    for seed in seeds:
        program = Program(everyone, hvd, seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program.run(8)
        except Exception as error:
            raise AssertionError(", ".join(program.log)) from error


@pytest.mark.ranks(1, 2, 3)
def test_some(everyone, hvd, monkeypatch):
    run(everyone, hvd, range(24), monkeypatch)


@pytest.mark.slow
@pytest.mark.ranks(2, 3, 4, timeout_s=300)
def test_many(everyone, hvd, monkeypatch):
    run(everyone, hvd, range(24, 150), monkeypatch)
