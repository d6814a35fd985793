"""Who ends with replicas that may differ, for want of `settle()`, hears so once."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import warnings, torch, bagua.torch as bagua
from bagua.algorithms import Algorithm, AsyncModelAverage, Decentralized, LocalSGD

def train(algorithm, steps, settles):
    param = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = bagua.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), algorithm=algorithm)
    for step in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
        if step == settles:
            optimizer.settle()
    bagua.barrier()  # else who ends first lacks in an average that another awaits

background = AsyncModelAverage(sync_interval_ms=0)
for case in (
    ("gossip", Decentralized(), 3, None),
    ("settled", Decentralized(), 3, 2),
    ("settled too early", Decentralized(), 3, 1),
    ("background", background, 3, None),
    ("background, settled", background, 3, 2),
    ("in a round", LocalSGD(every=2), 3, None),
    ("after a round", LocalSGD(every=2), 4, None),
    ("never stepped", Decentralized(), 0, None),
    ("gradients", Algorithm(), 3, None),
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bagua.init()
        me = bagua.rank()
        train(*case[1:])
        bagua.shutdown()
    told = [str(each.message) for each in caught if "settle()" in str(each.message)]
    print(f"{case[0]}: {len(told)} {told[0].split()[2] if told else ''}".strip())
"""

ON_THE_FIRST = """\
gossip: 1 decentralized
settled: 0
settled too early: 1 decentralized
background: 1 async_model_average
background, settled: 0
in a round: 1 local_sgd
after a round: 0
never stepped: 0
gradients: 0
"""


def test_the_first_rank_hears_so(run_ranks):
    result = run_ranks(2, PROGRAM)
    assert result.exit_code == 0, str(result)
    first, second = result.stdout
    assert first == ON_THE_FIRST
    assert not any(line.rpartition(": ")[2] != "0" for line in second.splitlines())


def test_a_single_rank_has_nobody_to_differ_from(run_ranks):
    result = run_ranks(1, PROGRAM)
    assert result.exit_code == 0, str(result)
    assert ": 1" not in result.stdout[0]


AT_UNLIKE_SPEEDS = """
import sys, time, torch, bagua.torch as bagua

bagua.init()
param = torch.nn.Parameter(torch.ones(3))
sgd = torch.optim.SGD([param], lr=0.1)
optimizer = bagua.DistributedOptimizer(sgd, algorithm="async_model_average")
for step in range(20):
    param.grad = torch.ones_like(param)
    optimizer.step()
    time.sleep(0.05 * bagua.rank())
print(step)
if len(sys.argv) > 1:
    optimizer.settle()
"""


def test_who_ends_first_does_not_stop_training_in_the_background(run_ranks):
    result = run_ranks(2, AT_UNLIKE_SPEEDS)
    assert result.exit_code == 0, str(result)
    assert result.stdout == ["19\n", "19\n"], str(result)
    assert "this rank trains on by itself" in result.stderr[1]
    assert "rank 0 has shut down" in result.stderr[1]


def test_who_settles_waits_for_the_slowest(run_ranks):
    result = run_ranks(2, AT_UNLIKE_SPEEDS, "settles")
    assert result.exit_code == 0, str(result)
    assert "by itself" not in "".join(result.stderr), str(result)


SLOW = """
import glob, os, time, torch, bagua.torch as bagua
from bagua.algorithms import AsyncModelAverage

bagua.init(stall_fail_s=2, stall_warn_s=1)
param = torch.nn.Parameter(torch.full((3, 4), float(bagua.rank())))
sgd = torch.optim.SGD([param], lr=0.0)
optimizer = bagua.DistributedOptimizer(sgd, algorithm=AsyncModelAverage(sync_interval_ms=0))

def steps(count):
    for _ in range(count):
        param.grad = torch.zeros_like(param)
        optimizer.step()
        time.sleep(0.01)

def meet(what):  # which nobody but the test waits for
    folder = os.path.dirname(os.path.abspath(__file__))
    open(f"{folder}/{what}.{bagua.rank()}", "w").close()
    while len(glob.glob(f"{folder}/{what}.*")) < 2:
        time.sleep(0.01)

steps(1)  # before it all wait for each other
meet("began")
steps(400) if bagua.rank() == 0 else time.sleep(5)
meet("ends")
optimizer.settle()
print(param.mean().item())
"""


def test_who_is_slow_is_no_stall(run_ranks):
    result = run_ranks(2, SLOW)
    assert result.stdout == ["0.0\n"] * 2, str(result)  # they begin with the first one's weights
    assert "wait for others" not in "".join(result.stderr), str(result)
