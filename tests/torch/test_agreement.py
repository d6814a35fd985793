"""Ranks that were told different things hear so when they wrap their optimizers, all of them."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm, QAdam

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


@pytest.mark.parametrize("make", [by_rank, exact_by_rank])
def test_functions_that_choose_otherwise(everyone, hvd, make):
    sgd = partial(torch.optim.SGD, lr=0.1)
    wrap(hvd, sgd, algorithm=make(0))  # another function on every rank, which chooses alike
    last = everyone.me == everyone.size - 1
    if everyone.size == 1:
        return
    words = f"algorithms differ between ranks: 0.weight travels by .* on rank {everyone.size - 1}"
    with pytest.raises(hvd.UsageError, match=words):
        wrap(hvd, sgd, algorithm=make(int(last)))


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


def test_the_rule_of_the_step(everyone, hvd):
    """Where gradients travel it makes replicas drift; weights may have been meant to."""
    lr = 0.1 + (everyone.me == everyone.size - 1)
    for algorithm in ("gradient_allreduce", "decentralized", "local_sgd"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrap(hvd, partial(torch.optim.SGD, lr=lr), algorithm=algorithm)
        told = [text for w in caught if "lr differs between ranks" in (text := str(w.message))]
        odd = everyone.size > 1 and algorithm == "gradient_allreduce"
        assert bool(told) == (odd and everyone.me == 0)
        assert all(f"0.1 on rank 0, 1.1 on rank {everyone.size - 1}" in text for text in told)


def test_the_rule_of_momentum(everyone, hvd):
    beta = 0.9 - 0.1 * (everyone.me == everyone.size - 1)
    make = partial(hvd.QAdam, betas=(beta, 0.999))
    if everyone.size == 1:
        wrap(hvd, make, algorithm=QAdam())
        return
    with pytest.raises(hvd.UsageError, match=r"the optimizer's betas differs between ranks"):
        wrap(hvd, make, algorithm=QAdam())
