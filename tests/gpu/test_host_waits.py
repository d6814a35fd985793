"""In a step the host does not wait for the GPU: torch tells of its own waits, a trace of all.

Nor does torch by staging: there the engine looks from time to time whether a copy has come.
"""

import contextlib
from dataclasses import replace

import pytest
import torch

from bagua.algorithms import find, names
from benchmarks.gpu import waits
from gpu.composed import COMPOSED

pytestmark = pytest.mark.ranks(1, 2)


@contextlib.contextmanager
def waits_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(optimizer, model, inputs, warmup=6, steps=4):
    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    with waits_are_errors():
        for _ in range(steps):
            step()
    assert waits(step, steps) == {}


def test_it_tells(hvd):
    with waits_are_errors(), pytest.raises(RuntimeError, match="synchroniz"):
        float(torch.ones(3, device="cuda").sum())


def test_the_benchmarks_trace_tells(hvd):
    def look(reads):
        total = torch.ones(3, device="cuda").sum()
        return float(total) if reads else None

    assert waits(lambda: look(reads=True))
    assert not waits(lambda: look(reads=False))


@pytest.mark.parametrize("name", [*names(), *COMPOSED])
def test_every_algorithm(hvd, name):
    # Without its warm-up, and in every step or every other.
    algorithm = COMPOSED.get(name) or find(name)
    warmup, every = min(2, algorithm.warmup_steps), min(2, algorithm.every)
    algorithm = replace(algorithm, warmup_steps=warmup, every=every)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    model.cuda()
    if algorithm.what == "momentum":
        inner = hvd.QAdam(model.parameters(), lr=0.01, warmup_steps=2)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=algorithm)
    run(optimizer, model, torch.randn(16, 20, device="cuda"))


def test_sync_batch_norm(hvd):
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), hvd.SyncBatchNorm(64)).cuda()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    run(optimizer, model, torch.randn(16, 20, device="cuda"))


def test_sparse_gradients(hvd):
    indices = torch.tensor([[0, 3]], device="cuda")
    gradient = torch.sparse_coo_tensor(indices, torch.ones(2, 4, device="cuda"), (5, 4))
    for _ in range(3):
        with waits_are_errors():
            hvd.synchronize(hvd.sparse_allreduce_async(gradient, "sparse"))
