"""What a rank brings for which the others did not wait must not meet what is newer."""

from __future__ import annotations

import re

import pytest

PROGRAM = """
import os, sys, time, torch, bagua.torch as bagua
from bagua.algorithms import LocalSGD

bagua.init(stall_fail_s=3, overlap=sys.argv[1], learn_bucket_order=False)
me, late = bagua.rank(), []

def tell(what):
    open(f"{__file__}.{what}.{me}", "w").close()

def await_other(what):  # which is no operation, and for as long as it takes
    while not os.path.exists(f"{__file__}.{what}.{1 - me}"):
        time.sleep(0.01)

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        if late:
            late.clear()
            await_other("gave up")
        return grad

torch.manual_seed(0)
first, last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
groups = [list(last.parameters()), list(first.parameters())]
params = [param for group in groups for param in group]
chosen = {"algorithm": LocalSGD(every=2)} if sys.argv[2] == "weights" else {"groups": groups}

def wrapped():
    return bagua.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), **chosen)

def step():
    optimizer.zero_grad()
    last(Slow.apply(first(torch.randn(4, 8))).tanh()).square().mean().backward()
    optimizer.step()

optimizer = wrapped()
torch.manual_seed(me)
for _ in range(3):
    step()
if me == 1:
    late.append(True)
try:
    step()
except bagua.PeerError as error:
    print(error)
tell("gave up")
try:
    step()
except bagua.UsageError as error:
    print(error)
tell("begins anew")
await_other("begins anew")
optimizer = wrapped()
bagua.broadcast_parameters(dict(enumerate(params)), 0)
for _ in range(4):
    step()
for theirs in bagua.allgather_object([param.detach() for param in params]):
    assert all(torch.equal(*both) for both in zip(theirs, params))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlap", "what"), [("always", "gradients"), ("never", "gradients"), ("always", "weights")]
)
def test_who_comes_too_late_hears_so(run_ranks, overlap, what):
    result = run_ranks(2, PROGRAM, overlap, what)
    assert result.exit_code == 0, str(result)
    for rank, output in enumerate(result.stdout):
        first, second = output.splitlines()
        assert ("rank 1 not ready after 3 s", "gave up waiting for this rank")[rank] in first
        assert "this rank gave up in the middle of a step" in second


APART = """
from dataclasses import dataclass
import torch
import bagua.torch as hvd
from bagua.algorithms import Algorithm

@dataclass(frozen=True)
class ThereAndBack(Algorithm):
    def at(self, step):
        away = 2 <= step < 4 + hvd.rank()
        return Algorithm(what="weight", every=50) if away else self

hvd.init(stall_fail_s=5)
model = torch.nn.Linear(3, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(sgd, algorithm=ThereAndBack())
for step in range(8):
    optimizer.zero_grad()
    model(torch.ones(1, 3) * step).sum().backward()
    optimizer.step()
"""


def test_ranks_that_change_in_different_steps(run_ranks):
    """They must not average gradients of one step with those of another."""
    result = run_ranks(2, APART)
    words = (
        r"at\(\) changes to ThereAndBack\(\) after 4 steps on rank 0, after 5 on rank 1, counted"
    )
    assert all(re.search(words, text) for text in result.stderr), str(result)


FLUSHES = """
import time, torch, bagua.torch as bagua

bagua.init()
tiny = torch.full((100,), 0.7e-38)
torch.set_flush_denormal(True)
for _ in range(3):
    handle = bagua.allreduce_async(tiny, op=bagua.Sum)
    if bagua.rank() == 0:
        time.sleep(0.05)  # so another thread than its caller's adds up
    total = bagua.synchronize(handle)
    torch.set_flush_denormal(False)
    print(total.max().item())
    torch.set_flush_denormal(True)
"""


def test_who_comes_late_adds_up_the_same_denormals(run_ranks):
    result = run_ranks(2, FLUSHES)
    assert result.exit_code == 0, str(result)
    assert result.stdout == ["1.4000000211677737e-38\n" * 3] * 2, str(result)
