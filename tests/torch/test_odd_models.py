"""Models that share, leave out or hardly have parameters, by every algorithm that has a name."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm, TopK, find, names
from bagua.algorithms.exchange import LOSSY

pytestmark = pytest.mark.ranks(1, 2, 3)

# What happens rarely by default happens in these few steps.
OFTEN = {
    "async_model_average": {"sync_interval_ms": 0},
    "diloco": {"every": 2},
    "local_sgd": {"every": 2},
    "powersgd": {"warmup_steps": 1},
    "qadam": {"warmup_steps": 2},
    "topk": {"density": 0.5},
}
ALGORITHMS = {
    name: dataclasses.replace(find(name), hierarchical=False, **OFTEN.get(name, {}))
    for name in names()
}
ALGORITHMS |= {
    "sign1": Algorithm(codec="sign1"),
    "minmax_u4": Algorithm(codec="minmax_u4", error_feedback=True),
    "fp8_e4m3": Algorithm(codec="fp8_e4m3"),
    "deep topk": TopK(momentum_correction=0.5, density=0.5, hierarchical=False),
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, rows, me):
        return self.second(torch.tanh(self.first(rows)))


class Unused(nn.Module):
    """One layer is used by all ranks, one by the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.sometimes = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, rows, me):
        hidden = self.used(rows)
        return self.sometimes(hidden) if me == 0 else hidden


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, sparse=True)
        self.linear = nn.Linear(16, 16)

    def forward(self, rows, me):
        words = (rows[:, :3].abs() * 10).long().clamp(max=49)
        return self.linear(self.embedding(words).mean(1))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.ones(1, 1))
        self.square = nn.Parameter(torch.ones(2, 2))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.strided = nn.Parameter(torch.zeros(1, 2)[:, 0])

    def forward(self, rows, me):
        return (
            rows * self.single + self.square.sum() + self.scalar + self.empty.sum() + self.strided
        )


MODELS = {"tied": Tied, "unused": Unused, "sparse": Sparse, "tiny": Tiny}
LEFT_ALONE = {"never.weight", "never.bias", "empty"}


def wrapped(hvd, named, algorithm):
    params = [param for _, param in named]
    if algorithm.what == "momentum":
        inner = hvd.QAdam(params, lr=0.01, warmup_steps=algorithm.warmup_steps)
    else:
        inner = torch.optim.SGD(params, lr=0.05)
    return hvd.DistributedOptimizer(inner, named, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_all_that_is_used_learns_and_ends_equal(everyone, hvd, kind, optimizers, algorithm):
    algorithm = ALGORITHMS[algorithm]
    torch.manual_seed(0)
    model = MODELS[kind]()
    named = list(model.named_parameters())
    begin = {name: param.detach().clone() for name, param in named}
    # In turn, as every backward pass is to reach parameters of each.
    trained = [wrapped(hvd, named[i::optimizers], algorithm) for i in range(optimizers)]
    generator = torch.Generator().manual_seed(everyone.me)

    def train() -> None:
        for _ in range(8):
            rows = torch.randn(4, 16, generator=generator)
            for optimizer in trained:
                optimizer.zero_grad()
            (model(rows, everyone.me) - rows).square().mean().backward()
            for optimizer in trained:
                optimizer.step()
        for optimizer in trained:
            optimizer.settle()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "sparse" and (algorithm.what == "momentum" or algorithm.momentum_correction):
            with pytest.raises(hvd.UsageError, match=r"is sparse, and .*momentum is not"):
                train()
            return
        train()
    for theirs in hvd.allgather_object([param.detach() for param in model.parameters()]):
        assert all(map(torch.equal, theirs, model.parameters()))
    for name, param in named:
        assert param.isfinite().all()
        if name not in LEFT_ALONE:
            assert not torch.equal(param, begin[name])
        elif algorithm.what == "grad" and algorithm.codec not in LOSSY:  # which may have no zero
            assert torch.equal(param, begin[name])
