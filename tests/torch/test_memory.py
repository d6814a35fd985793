"""What must be given back, and what a child must not touch."""

from __future__ import annotations

import gc
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import bagua

pytestmark = pytest.mark.ranks(1, 2)


def test_optimizers_are_collected(hvd):
    weights = []
    for _ in range(3):
        model = torch.nn.Linear(4, 4)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        weights.append(weakref.ref(model.weight))
    del model, optimizer
    gc.collect()
    assert [weight() for weight in weights] == [None] * 3


@pytest.mark.parametrize("calling", ["main", "another"])
def test_what_nobody_waits_for_is_given_back(hvd, calling):
    def start() -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(20_000_000)
        hvd.allreduce_async_(tensor, name=f"nobody waits, {calling}")
        return weakref.ref(tensor)

    if calling == "main":
        left = start()
    else:
        with ThreadPoolExecutor(1) as thread:
            left = thread.submit(start).result()
    until = time.monotonic() + 30
    while left() is not None:  # and the engine is not called
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_model_outlives_its_optimizer(hvd):
    model = torch.nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    del optimizer
    gc.collect()
    model(torch.ones(1, 4) * (1 + hvd.rank())).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 1.0 + hvd.rank())), "not exchanged"


def test_arenas_are_given_back(hvd):
    arena = None
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        del arena
        arena = hvd.empty_shared(4_200_000 + number * 2000)
        assert arena[-1] == 0
        hvd.allreduce_(arena.fill_(1), op=hvd.Sum, name="arena")
        assert arena[0] == arena[-1] == hvd.size()
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_a_forked_child_is_told_that_it_cannot(everyone, hvd):
    param = torch.nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1))
    param.sum().backward()
    optimizer.step()
    handle = hvd.allreduce_async(torch.ones(10), op=hvd.Sum)
    pid = os.fork()
    if pid == 0:
        told = int(handle.poll())  # then it may be waited for here, too
        attempts = [] if told else [handle.wait]
        for attempt in (
            *attempts,
            lambda: param.sum().backward(),
            optimizer.synchronize,
            lambda: hvd.allreduce(torch.ones(10)),
        ):
            try:
                attempt()
            except hvd.UsageError as error:
                told += "initialized" in str(error) or "init()" in str(error)
        os._exit(told)
    _, status = os.waitpid(pid, 0)
    assert os.WEXITSTATUS(status) == 4
    assert (handle.wait() == everyone.size).all()
    optimizer.zero_grad()
    ((everyone.me + 1) * param.sum()).backward()
    assert (param.grad == (everyone.size + 1) / 2).all()


def test_a_forked_child_cannot_touch_its_parents_arenas(hvd):
    arena = hvd.empty_shared(1000, 1000).fill_(1)
    pid = os.fork()
    if pid == 0:
        fine = arena.sum().item() == 1e6
        arena.zero_()
        del arena
        os._exit(0 if fine else 1)
    assert os.waitpid(pid, 0)[1] == 0, "the child did not see the values"
    assert arena.sum().item() == 1e6
    assert hvd.allreduce(arena, op=hvd.Sum)[0, 0] == hvd.size()


def test_empty_shared_takes_shapes_as_empty_does(hvd):
    assert hvd.empty_shared(2, 3).shape == hvd.empty_shared((2, 3)).shape == (2, 3)
    assert hvd.empty_shared(0, 3).shape == (0, 3)
    assert hvd.empty_shared(4, dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises((RuntimeError, TypeError)):
        hvd.empty_shared(-5)
    for shape in (-1, (-2, -3)):
        with pytest.raises(bagua.UsageError, match="from 0 on"):
            bagua.empty_shared(shape)
    assert bagua.empty_shared((2, 3), np.int16).shape == (2, 3)


def test_lists_may_change_after_the_call(hvd):
    for start in (
        hvd.grouped_allreduce_async,
        hvd.grouped_allgather_async,
        hvd.grouped_reducescatter_async,
    ):
        tensors = [torch.ones(4), torch.ones(6)]
        handle = start(tensors)
        tensors.clear()
        assert len(handle.wait()) == 2


def test_splits_whose_sum_overflows(hvd):
    splits = [2**62] * hvd.size() if hvd.size() > 1 else [2**63 - 1]
    with pytest.raises(bagua.UsageError, match="splits"):
        hvd.alltoall(torch.ones(3), splits=splits)
