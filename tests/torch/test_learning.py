"""Every algorithm learns what a single process learns, although no rank sees every kind of sample.

A batch is sorted by label before the ranks share it: a rank on its own knows half of the digits.
`python -m benchmarks.learning` measures the same with more care.

What is asked is one percentage point of test accuracy. Of the 1797 images half are for training and
900 for testing, by seeds that stay; accuracies are means of two seeds, over 1800 answers. Over
three seeds the algorithms differed from the single process by -0.33 to 0.59 points in the mean,
with a standard deviation of at most 0.31 between seeds: a point is three or more of those of a mean
of two. All but one of them come out alike each time, on one kind of processor.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from bagua.algorithms import Algorithm, find, names

pytestmark = pytest.mark.ranks(2)

STEPS = 300
SEEDS = (0, 1)
ASKED = 0.01  # at most so much less of the test images
BATCH = 64
OPTIONS = {
    "async_model_average": {"sync_interval_ms": 0},
    "diloco": {"every": 4, "outer_momentum": 0.5},
    "local_sgd": {"every": 4},
}
# Ranks that share memory encode nothing if they are hierarchical.
ALGORITHMS = {
    name: replace(find(name), hierarchical=False, **OPTIONS.get(name, {})) for name in names()
} | {
    "minmax_u4": Algorithm(codec="minmax_u4", error_feedback=True),
    "sign1": Algorithm(codec="sign1"),
}


@pytest.fixture(scope="module")
def digits():
    """For each seed the images and labels of 897 digits for training, and of 900 for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    orders = [torch.randperm(1797, generator=torch.Generator().manual_seed(s)) for s in SEEDS]
    return [[(images[o], labels[o]) for o in (order[900:], order[:900])] for order in orders]


def trained(digits, share, wrap, pause_s=0.0) -> tuple[nn.Module, float]:
    """A model, and its accuracy; `share` are the places of a batch that are taken."""
    (images, labels), (test_images, test_labels) = digits
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = wrap(model)
    for _ in range(STEPS):
        batch = torch.randperm(len(labels), generator=generator)[:BATCH]
        mine = batch[labels[batch].argsort()][share]
        optimizer.zero_grad()
        functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.99
        time.sleep(pause_s)
    if hasattr(optimizer, "settle"):
        optimizer.settle()
    with torch.no_grad():
        right = model(test_images).argmax(1) == test_labels
    return model, float(right.float().mean())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def distributed(hvd, name, model):
    algorithm = ALGORITHMS[name]
    optimizer = sgd(model)
    if algorithm.what == "momentum":
        optimizer = hvd.QAdam(model.parameters(), 0.01, algorithm.warmup_steps)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=algorithm)


def half(everyone) -> slice:
    """This rank's share of the labels."""
    share = BATCH // everyone.size
    return slice(everyone.me * share, (everyone.me + 1) * share)


@pytest.fixture(scope="module")
def alone(digits) -> float:
    """What a single process gets right."""
    return statistics.fmean(trained(split, slice(None), sgd)[1] for split in digits)


def together(hvd, digits, share, name, pause_s=0.0) -> float:
    """What ranks get right, who end equal."""
    accuracies = []
    for split in digits:
        model, accuracy = trained(split, share, partial(distributed, hvd, name), pause_s)
        accuracies.append(accuracy)
        for theirs in hvd.allgather_object([p.detach() for p in model.parameters()]):
            assert all(torch.equal(a, b) for a, b in zip(theirs, model.parameters()))
    return statistics.fmean(accuracies)


def test_a_rank_by_itself_does_not(everyone, digits, alone):
    for split in digits:
        assert trained(split, half(everyone), sgd)[1] < alone - 0.15


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if ALGORITHMS[n].when != "background"])
def test_learns_what_a_single_process_learns(everyone, hvd, digits, alone, name):
    assert together(hvd, digits, half(everyone), name) > alone - ASKED


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if ALGORITHMS[n].when == "background"])
def test_learns_although_nobody_says_when_ranks_exchange(everyone, hvd, digits, alone, name):
    """So here they share all labels."""
    before = hvd.counters()["exchanges"]
    every_other = slice(everyone.me, None, everyone.size)
    assert together(hvd, digits, every_other, name, pause_s=0.002) > alone - ASKED
    assert hvd.counters()["exchanges"] > before + 10 * len(digits)
