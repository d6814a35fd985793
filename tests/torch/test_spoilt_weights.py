"""Weights that are no numbers, and changes that overflow: named, and kept from the others."""

from __future__ import annotations

import dataclasses
import re
import time
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from bagua.algorithms import (
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
)
from bagua.common.world import world

pytestmark = pytest.mark.ranks(1, 2, 3)

WHERE = re.compile(r"odd \(optimizer\.\d+\.weights\.")


@pytest.fixture(params=["skip", "report"])
def wish(monkeypatch, hvd, request):
    config = dataclasses.replace(world().config, check_finite=request.param)
    monkeypatch.setattr(world(), "config", config)
    return request.param


@contextmanager
def told(words: list[str]):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    words += [text for w in caught if "NaN or Inf" in (text := str(w.message))]


def make(hvd, algorithm):
    params = [nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(5))]
    named = [("fine", params[0]), ("odd", params[1])]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params, lr=1.0), named, algorithm=algorithm
    )
    return params, optimizer


def spoil(everyone, params) -> None:
    """The last rank's, as a learning rate that is too large does."""
    if everyone.me == everyone.size - 1:
        params[1].data[3] = torch.inf


DECENTRALIZED = [Decentralized(when=when, peers="all") for when in ("step", "forward")]


@pytest.mark.parametrize("algorithm", DECENTRALIZED)
def test_weights(everyone, hvd, wish, algorithm):
    params, optimizer = make(hvd, algorithm)
    last, words = everyone.size - 1, []
    optimizer.step()
    optimizer.synchronize()
    spoil(everyone, params)
    with told(words):
        optimizer.step()
        optimizer.synchronize()
    assert bool(words) == (everyone.me == 0)
    for text in words:
        assert WHERE.search(text)
        assert f"on rank {last}" in text
        assert ("the exchange is skipped on all ranks" in text) == (wish == "skip")
    assert (params[0] == 1).all()
    assert bool(params[1].isfinite().all()) == (wish == "skip" and everyone.me != last)
    if everyone.me == last:
        params[1].data.fill_(1.0)  # the user mends it
    if wish == "skip":
        optimizer.step()
        optimizer.synchronize()
        assert all((param == 1).all() for param in params)


@pytest.mark.parametrize("when", ["step", "forward"])
def test_a_round_is_undone(everyone, hvd, wish, when):
    params, optimizer = make(hvd, LocalSGD(every=2, when=when))
    words: list[str] = []

    def steps(count: int, change: float) -> None:
        for _ in range(count):
            for param in params:
                param.grad = torch.full_like(param, -change * (everyone.me + 1))
            optimizer.step()

    steps(4, 1.0)
    optimizer.settle()
    common = [param.detach().clone() for param in params]
    steps(1, 1.0)
    spoil(everyone, params)
    with told(words):
        steps(1, 1.0)
    assert bool(words) == (everyone.me == 0)
    assert all(f"on rank {everyone.size - 1}" in text for text in words[:1])
    assert all(("the round is undone" in text) == (wish == "skip") for text in words)
    if wish == "report":
        optimizer.settle()
        assert not params[1].isfinite().all()
        return
    for param, before in zip(params, common):
        assert torch.equal(param, before)
    with told(words):
        steps(2, 1.0)
        optimizer.settle()
    for param, before in zip(params, common):
        assert torch.allclose(param, before + (everyone.size + 1), rtol=1e-6)
    assert len(words) == (everyone.me == 0)


def test_changes_that_overflow_in_a_codec(everyone, hvd, wish):
    params, optimizer = make(hvd, LocalSGD(every=2, codec="fp16", hierarchical=False))
    words: list[str] = []
    optimizer.step()
    params[1].data[3] = 1e6
    with told(words):
        optimizer.step()
    travels = everyone.size > 1
    assert bool(words) == (travels and everyone.me == 0)
    assert all("odd (" in text and "after its exchange" in text for text in words)
    if wish == "skip" and travels:
        assert all((param == 1).all() for param in params)
        assert all("the round is undone on all ranks" in text for text in words)
    else:
        assert bool(params[1].isfinite().all()) == (not travels)


def test_in_the_background(everyone, hvd, wish):
    params, optimizer = make(hvd, AsyncModelAverage(sync_interval_ms=0.0))
    optimizer.step()
    optimizer.settle()
    spoil(everyone, params)
    words: list[str] = []
    with told(words):
        for _ in range(20):
            optimizer.step()
            time.sleep(0.001)
        optimizer.settle()  # what was under way has arrived, if only from a rank that came late
    last = everyone.me == everyone.size - 1
    if last:
        assert any(WHERE.search(text) and "about to be averaged" in text for text in words)
        assert any(f"on rank {everyone.me}" in text for text in words)
    if wish == "skip":
        assert params[0].isfinite().all()
    assert any("after its exchange" in text for text in words) == (everyone.me == 0)


SETTLING = [
    Decentralized(when="step", hierarchical=False),
    LowPrecisionDecentralized(hierarchical=False),
    DiLoCo(every=2, when="forward"),
    AsyncModelAverage(sync_interval_ms=0.0),
]


@pytest.mark.parametrize("how", ["settle", "hand over"])
@pytest.mark.parametrize("finite", ["skip", "watch"])
@pytest.mark.parametrize("algorithm", SETTLING, ids=repr)
def test_an_exact_average(everyone, hvd, monkeypatch, algorithm, finite, how):
    """Of the others' weights; and of their moments, where gradients are exchanged from there on."""
    config = dataclasses.replace(world().config, check_finite=finite)
    monkeypatch.setattr(world(), "config", config)
    params = [nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(5))]
    adam = torch.optim.Adam(params)
    named = [("fine", params[0]), ("odd", params[1])]
    optimizer = hvd.DistributedOptimizer(adam, named, algorithm=algorithm)
    for _ in range(3):
        optimizer.zero_grad()
        sum(param.square().sum() for param in params).backward()
        optimizer.step()
    spoil(everyone, params)
    last, words = everyone.size - 1, []
    if everyone.me == last:
        adam.state[params[1]]["exp_avg"][3] = torch.inf
    with told(words):
        if how == "settle":
            optimizer.settle()
        else:
            optimizer.set_algorithm("gradient_allreduce")
    mine = [word for word in words if "when all weights are averaged" in word]
    # What is under way in the background may bring it before, unless that is skipped, too.
    may_be_everybodys = algorithm.when == "background" and finite == "watch"
    assert len(mine) == (everyone.me == last) or (may_be_everybodys and len(mine) == 1)
    assert all(f"NaN or Inf in odd on rank {everyone.me}" in word for word in mine)
    left_out = finite == "skip" and everyone.size > 1
    assert all(("is left out" in word) == left_out for word in mine)
    kept = [state["exp_avg"] for state in adam.state.values()] if how == "hand over" else []
    for values in (*params, *kept):
        assert values.isfinite().all() or not left_out
        for theirs in hvd.allgather_object(values.detach()):
            assert torch.equal(theirs.nan_to_num(), values.detach().nan_to_num())
    assert params[1].isfinite().all() == left_out
