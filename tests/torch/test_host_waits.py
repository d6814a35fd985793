"""No step asks a tensor for a number, for which the host would wait for a GPU.

On CPUs it may: there this runs with PRETEND_GPU=1 only. tests/gpu has the like for a real one.
"""

import os
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bagua.algorithms import find, names

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(not os.environ.get("PRETEND_GPU"), reason="the host may wait for itself"),
]


class Numbers(TorchDispatchMode):
    """Counts the numbers that are asked for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def steps_of(optimizer, model, inputs):
    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def asked(step, warmup=4, steps=4):
    for _ in range(warmup):
        step()
    with Numbers() as numbers:
        for _ in range(steps):
            step()
    return numbers.count


def test_it_counts():
    with Numbers() as numbers:
        assert float(torch.ones(3).sum()) == 3
    assert numbers.count == 1


@pytest.mark.parametrize("name", names())
def test_every_algorithm(everyone, hvd, name):
    algorithm = find(name)  # without its warm-up, and in every step or every other
    warmup, every = min(2, algorithm.warmup_steps), min(2, algorithm.every)
    algorithm = replace(algorithm, warmup_steps=warmup, every=every)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    if algorithm.what == "momentum":
        inner = hvd.QAdam(model.parameters(), lr=0.01, warmup_steps=2)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=algorithm)
    assert asked(steps_of(optimizer, model, torch.randn(16, 20))) == 0


@pytest.mark.parametrize("momentum", [0.1, None])
def test_sync_batch_norm(everyone, hvd, momentum):
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64), hvd.SyncBatchNorm(64, momentum=momentum), torch.nn.Linear(64, 5)
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    assert asked(steps_of(optimizer, model, torch.randn(16, 20))) == 0


def test_sparse_gradients(everyone, hvd):
    gradient = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), torch.ones(2, 4), (5, 4))

    def step():
        hvd.synchronize(hvd.sparse_allreduce_async(gradient, "sparse"))

    assert asked(step) == 0
