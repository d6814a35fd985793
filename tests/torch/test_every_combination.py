"""Every combination of choices that an algorithm accepts trains, ends equal and can be resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import random
import warnings

import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm, TopK
from bagua.algorithms.exchange import CODECS, PEERS, TIMES
from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp
from bagua.common.world import world

CHOICES = {
    "what": TIMES,
    "codec": CODECS,
    "peers": PEERS,
    "when": ["", *sorted({when for times in TIMES.values() for when in times})],
    "every": [1, 2],
    "error_feedback": [None, True],
    "hierarchical": [False, True],
    "op": [ReduceOp.Average, ReduceOp.Sum],
    "warmup_steps": [0, 2],
}
OF_GRADIENTS = {
    "codec": CODECS,
    "low_rank": [0, 1, 2],
    "momentum_correction": [0.0, 0.5],
    "warmup_steps": [0, 2],
}
FALLING = [
    TopK(warmup_steps=steps, momentum_correction=momentum, hierarchical=False, density=0.02)
    for steps in (3, 4, 5)
    for momentum in (0.0, 0.5)
]
STEPS, SAVED = 7, 3  # the last step before the checkpoint
MOMENTUM_WARMUP = 2


def accepted(choices) -> list[Algorithm]:
    found = []
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values))
        if chosen.get("what") == "momentum" and chosen["warmup_steps"] != MOMENTUM_WARMUP:
            continue  # the optimizer has one, too
        if chosen["codec"] == "topk":
            chosen["density"] = 0.2
        with contextlib.suppress(UsageError):
            found.append(Algorithm(**chosen))
    return found


def everything() -> list[Algorithm]:
    return list(dict.fromkeys(accepted(CHOICES) + accepted(OF_GRADIENTS) + FALLING))


class Course:
    """A model and its optimizer, on this rank."""

    def __init__(self, everyone, hvd, algorithm: Algorithm) -> None:
        self.me, self.algorithm = everyone.me, algorithm
        torch.manual_seed(0)
        first, norm = nn.Linear(20, 40), nn.LayerNorm(40)
        second, last = nn.Linear(40, 30, bias=False), nn.Linear(30, 20)
        self.model = nn.Sequential(first, norm, second, nn.Tanh(), last)
        params = list(self.model.parameters())
        if algorithm.what == "momentum":
            inner = hvd.QAdam(params, lr=0.01, warmup_steps=MOMENTUM_WARMUP)
        else:
            momentum = 0.0 if algorithm.momentum_correction else 0.9
            inner = torch.optim.SGD(params, lr=0.02, momentum=momentum)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(inner, named, algorithm=algorithm)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * self.me + number)
        rows = torch.randn(4, 20, generator=generator)
        self.optimizer.zero_grad()
        (self.model(rows) - rows).square().mean().backward()
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        model, optimizer = torch.load(file, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def problems(everyone, hvd, algorithm: Algorithm) -> list[str]:
    """What is wrong on any rank; all have taken the same way to here."""

    def replicas_differ() -> bool:
        everyones = hvd.allgather_object(course.weights())
        return not all(equal(theirs, everyones[0]) for theirs in everyones)

    found = []
    course = Course(everyone, hvd, algorithm)
    for number in range(STEPS):
        course.step(number)
        if algorithm.at(number).what in ("grad", "momentum") and replicas_differ():
            found.append(f"unequal after step {number}")
        if number == SAVED:
            file = course.save()
    ended_with = course.weights()
    if not all(bool(weight.isfinite().all()) for weight in ended_with):
        found.append("not finite")
    course.optimizer.settle()
    if replicas_differ():
        found.append("unequal after settle()")
    if algorithm.when != "background":  # where it is chance which step an average comes after
        resumed = Course(everyone, hvd, algorithm)
        resumed.load(file)
        for number in range(SAVED + 1, STEPS):
            resumed.step(number)
        if not equal(resumed.weights(), ended_with):
            found.append("resumes in other bits")
    return found


def try_all(everyone, hvd, monkeypatch, algorithms: list[Algorithm]) -> None:
    several_buckets = dataclasses.replace(world().config, bucket_mb=0.004)
    monkeypatch.setattr(world(), "config", several_buckets)
    found = {}
    for algorithm in algorithms:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                mine = problems(everyone, hvd, algorithm)
            except UsageError as error:  # all ranks hear
                mine = [str(error)]
        if wrong := sorted({text for texts in hvd.allgather_object(mine) for text in texts}):
            found[repr(algorithm)] = wrong
    assert found == {}


def test_all_choices_are_among_them():
    algorithms = everything()
    for name, values in (CHOICES | OF_GRADIENTS).items():
        assert {getattr(algorithm, name) for algorithm in algorithms} >= set(values) - {""}


@pytest.mark.ranks(1, 2, 3)
def test_some(everyone, hvd, monkeypatch):
    try_all(everyone, hvd, monkeypatch, random.Random(0).sample(everything(), 40))


@pytest.mark.slow
@pytest.mark.ranks(2, timeout_s=300)
def test_all(everyone, hvd, monkeypatch):
    try_all(everyone, hvd, monkeypatch, everything())
