"""Models that are more than a stack of layers, under every way to communicate.

Losses are linear in the weights, so a rank's gradients are the same in every step, and whoever
averages what with whom: the mean of all weights, less what residuals still owe it, moves by the
mean gradient.
"""

from __future__ import annotations

import copy
import functools
import time

import pytest
import torch
from torch import nn

from bagua.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    LocalSGD,
    LowPrecisionDecentralized,
    QAdam,
    TopK,
)
from bagua.common.world import world

pytestmark = pytest.mark.ranks(2, 3)

STEPS, LR = 8, 0.25
# What they may lose of the sum of gradients of about 1; residuals are no loss.
ALGORITHMS = {
    "bytegrad": (ByteGrad(hierarchical=False), 0.3),
    "bytegrad with feedback": (ByteGrad(hierarchical=False, error_feedback=True), 1e-4),
    "topk": (TopK(hierarchical=False, density=0.05), 1e-4),
    "sign1": (Algorithm(codec="sign1"), 1e-4),
    "decentralized": (Decentralized(hierarchical=False), 1e-4),
    "low_precision_decentralized": (LowPrecisionDecentralized(hierarchical=False), 0.1),
    "local_sgd": (LocalSGD(every=3), 1e-4),
}


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Partly(nn.Module):
    """Of which a rank uses what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.everyones = nn.Parameter(noise(0, 30, 50))
        self.everyones_bias = nn.Parameter(noise(1, 7))
        self.firsts = nn.Parameter(noise(2, 30, 50))
        self.nobodys = nn.Parameter(noise(3, 30, 50))
        self.nobodys_bias = nn.Parameter(noise(4, 7))

    def loss(self, rank: int) -> torch.Tensor:
        loss = (self.everyones * noise(rank, 30, 50)).sum() + self.everyones_bias.sum()
        return loss + (self.firsts * noise(9, 30, 50)).sum() if rank == 0 else loss


class Tied(nn.Module):
    """A layer that begins and ends with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40)
        self.head.weight = self.words.weight
        with torch.no_grad():
            self.words.weight.copy_(noise(0, 40, 16))
            self.head.bias.zero_()

    def loss(self, rank: int) -> torch.Tensor:
        words = self.words(torch.tensor([rank, 7, 7])) * noise(rank, 3, 16)
        return (
            words.sum() + (self.head(noise(10 + rank, 2, 16)) * noise(20 + rank, 2, 40)).sum() / 4
        )


class Sparse(nn.Module):
    """Every rank looks up other rows, and the last one none."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16, sparse=True)
        self.head = nn.Parameter(noise(0, 30, 50))
        with torch.no_grad():
            self.words.weight.copy_(noise(0, 40, 16))

    def loss(self, rank: int) -> torch.Tensor:
        loss = (self.head * noise(rank, 30, 50)).sum()
        if rank == world().size - 1:
            return loss
        return loss + (self.words(torch.tensor([rank, 7, 7])) * noise(rank, 3, 16)).sum()


def assert_equal_replicas(hvd, model) -> None:
    for theirs in hvd.allgather_object([param.detach() for param in model.parameters()]):
        assert all(torch.equal(a, b) for a, b in zip(theirs, model.parameters()))


class Run:
    """A model whose parameters may have several optimizers."""

    def __init__(self, everyone, hvd, model, algorithm, parts=1, inner=torch.optim.SGD) -> None:
        self.everyone, self.hvd, self.model = everyone, hvd, model
        self.named = list(model.named_parameters())
        params = [param for _, param in self.named]
        self.optimizers = [
            hvd.DistributedOptimizer(
                inner(params[part::parts], lr=LR), self.named, algorithm=algorithm
            )
            for part in range(parts)
        ]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model.loss(self.everyone.me).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def learned(self) -> dict[str, torch.Tensor]:
        """The mean of all weights, less what is owed by ranks and by those who encode means."""
        lost = {}
        for optimizer in self.optimizers:
            kept = optimizer.state_dict().get("bagua", {}).get("kept") or {}
            lost |= kept.get("lost", {})
        mine = {name: (param.detach(), lost.get(name, [])) for name, param in self.named}
        total = {name: torch.zeros(param.shape).double() for name, param in self.named}
        shares = (1 / self.everyone.size, 1)
        for theirs in self.hvd.allgather_object(mine):
            for name, (weights, residuals) in theirs.items():
                total[name] += weights.double() / self.everyone.size
                for residual, share in zip(residuals, shares):
                    total[name] -= LR * share * residual.view_as(weights)
        return total

    def means(self) -> dict[str, torch.Tensor]:
        """Of all ranks' gradients."""
        params = [param for _, param in self.named]
        total = [torch.zeros_like(param) for param in params]
        for rank in self.everyone.ranks:
            grads = torch.autograd.grad(self.model.loss(rank), params, allow_unused=True)
            total = [a if b is None else a + b.to_dense() for a, b in zip(total, grads)]
        return {name: grad / self.everyone.size for (name, _), grad in zip(self.named, total)}


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize(
    ("kind", "parts"), [(Partly, 1), (Tied, 1), (Sparse, 1), (Partly, 2), (Tied, 2)]
)
def test_all_move_by_the_mean_gradient(everyone, hvd, kind, parts, name):
    algorithm, lost = ALGORITHMS[name]
    run = Run(everyone, hvd, kind(), algorithm, parts)
    run.step()  # after which buckets are laid out anew, without what was lost of means
    begin = run.learned()
    for _ in range(STEPS):
        run.step()
    for optimizer in run.optimizers:
        optimizer.settle()
    assert_equal_replicas(hvd, run.model)
    end, means = run.learned(), run.means()
    for what, param in run.named:
        moved = begin[what] - LR * STEPS * means[what]
        torch.testing.assert_close(end[what], moved, rtol=1e-5, atol=LR * lost)
        if algorithm.what == "grad" and "nobodys_bias" in what:
            assert torch.equal(param, kind().nobodys_bias)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", [Partly, Tied])
def test_all_move_by_the_mean_momentum(everyone, hvd, kind, parts):
    """Of gradients that are always the same momentum is one, and their square the variance."""
    warmup_steps = 3
    algorithm = QAdam(hierarchical=False, warmup_steps=warmup_steps)
    inner = functools.partial(hvd.QAdam, warmup_steps=warmup_steps)
    run = Run(everyone, hvd, kind(), algorithm, parts, inner)
    for _ in range(STEPS):
        run.step()
    assert_equal_replicas(hvd, run.model)
    means = run.means()
    for (what, param), (_, begin) in zip(run.named, kind().named_parameters()):
        square = means[what].square()
        frozen = means[what] / square.clamp(min=0.01 * square.mean() + 1e-12).sqrt()
        moves = warmup_steps * means[what].sign() + (STEPS - warmup_steps) * frozen
        torch.testing.assert_close(param, begin - LR * moves, rtol=1e-4, atol=LR * 0.2)
        assert "nobodys_bias" not in what or torch.equal(param, begin)


@pytest.mark.usefixtures("overlap")
def test_momentum_is_not_sparse_and_says_so(everyone, hvd):
    """On all ranks, whose gradients are sparse or not."""
    run = Run(everyone, hvd, Sparse(), TopK(momentum_correction=0.9))
    with pytest.raises(hvd.UsageError, match=r"words\.weight is sparse, and momentum is not"):
        run.step()


class Evaluates(nn.Module):
    """Of which training and evaluation are not the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 40), nn.Dropout(), nn.Tanh(), nn.Linear(40, 3))

    def loss(self, rank: int) -> torch.Tensor:
        return (self.layers(noise(rank, 6, 8)) - noise(10 + rank, 6, 3)).square().mean()


def evaluate(run, passes) -> None:
    """So many forward passes; they are no steps, and change nothing."""
    before = [param.detach().clone() for param in run.model.parameters()]
    run.model.eval()
    for _ in passes:
        with torch.no_grad():
            run.model.loss(run.everyone.me)
        time.sleep(0.002)
    run.model.train()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters()))


@pytest.mark.parametrize("sync_interval_ms", [0.0, 2.0])
def test_others_train_on_while_a_rank_evaluates(everyone, hvd, sync_interval_ms):
    algorithm = AsyncModelAverage(sync_interval_ms=sync_interval_ms)
    run = Run(everyone, hvd, Evaluates(), algorithm)
    (optimizer,) = run.optimizers
    for _ in range(3):
        run.step()
    for evaluating in everyone.ranks:
        steps, *_ = optimizer.progress
        if everyone.me != evaluating:
            for _ in range(20):
                run.step()
        done = torch.tensor([optimizer.progress[0] - steps])
        # It is over when all have got here: the evaluating rank at once, the others by training.
        others = hvd.allreduce_async(done, name=f"steps.{evaluating}", op=hvd.Sum)
        if everyone.me == evaluating:
            evaluate(run, iter(functools.partial(hvd.poll, others), True))
            assert optimizer.progress[0] == steps
        assert hvd.synchronize(others).item() == 20 * (everyone.size - 1)
        run.step()
    optimizer.settle()
    assert_equal_replicas(hvd, run.model)
    assert optimizer.progress[0] == 3 + 20 * (everyone.size - 1) + everyone.size


@pytest.mark.parametrize(
    "algorithm",
    [
        Decentralized(hierarchical=False),
        Decentralized(hierarchical=False, when="step", peers="ring"),
        LowPrecisionDecentralized(hierarchical=False),
    ],
    ids=repr,
)
def test_a_rank_that_evaluates_changes_nothing_but_the_time(everyone, hvd, algorithm):
    """Others that need it wait for its next step."""
    results = []
    for evaluates in (False, True):
        run = Run(everyone, hvd, Evaluates(), algorithm)
        for step in range(8):
            if evaluates and step % everyone.size == everyone.me:
                evaluate(run, range(10))
            torch.manual_seed(step)  # of dropout
            run.step()
        unsettled = copy.deepcopy(run.model)
        run.optimizers[0].settle()
        assert_equal_replicas(hvd, run.model)
        results.append([*unsettled.parameters(), *run.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.usefixtures("overlap")
def test_who_needs_a_parameter_only_after_the_warm_up_is_told_why(everyone, hvd):
    """And so are those who do not need it yet."""
    model = Partly()
    inner = functools.partial(hvd.QAdam, warmup_steps=2)
    run = Run(everyone, hvd, model, QAdam(hierarchical=False, warmup_steps=2), inner=inner)
    for _ in range(4):
        run.step()
    (optimizer,) = run.optimizers
    optimizer.zero_grad()
    loss = model.loss(everyone.me)
    if everyone.me == everyone.size - 1:
        loss = loss + model.nobodys.sum()
    with pytest.raises(hvd.UsageError, match="had no gradient in the warm-up"):
        loss.backward()
    run.step()
    assert_equal_replicas(hvd, model)
