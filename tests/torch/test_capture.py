"""What cannot be captured in a CUDA graph is refused; what can is in tests/gpu/test_graphs.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm
from bagua.common.world import world
from bagua.torch import capture

pytestmark = pytest.mark.ranks(1, 2)


@pytest.fixture
def capturing(monkeypatch):
    return lambda: monkeypatch.setattr(capture, "is_capturing", lambda: True)


def model_and_optimizer(hvd, algorithm="gradient_allreduce"):
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_the_first_step_is_refused_and_later_ones_are_not(hvd, capturing, monkeypatch):
    model, optimizer = model_and_optimizer(hvd)
    with monkeypatch.context() as m:
        m.setattr(capture, "is_capturing", lambda: True)
        with pytest.raises(hvd.UsageError, match=r"cannot be captured .* take two before"):
            step(model, optimizer)
    step(model, optimizer)
    step(model, optimizer)
    capturing()
    step(model, optimizer)


@pytest.mark.parametrize("setting", ["check_finite", "check_replicas_every"])
def test_what_looks_at_values_is_refused(hvd, capturing, monkeypatch, setting):
    value = "report" if setting == "check_finite" else 100
    changed = dataclasses.replace(world().config, **{setting: value})
    monkeypatch.setattr(world(), "config", changed)
    model, optimizer = model_and_optimizer(hvd)
    step(model, optimizer)
    step(model, optimizer)
    capturing()
    with pytest.raises(hvd.UsageError, match=f"cannot be captured .* {setting} has the host look"):
        step(model, optimizer)


@pytest.mark.parametrize(
    "algorithm", ["local_sgd", "decentralized", Algorithm(codec="topk", warmup_steps=3)]
)
def test_what_counts_steps_is_refused(hvd, capturing, algorithm):
    model, optimizer = model_and_optimizer(hvd, algorithm)
    step(model, optimizer)
    capturing()
    with pytest.raises(hvd.UsageError, match=r"cannot be captured .* counts its steps"):
        step(model, optimizer)
