"""Gradients that come by several streams of a device, which is pretended here."""

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import torch
from bagua.common.core import core
from bagua.torch import arrays

arrays._host = 0
core.pretend(5_000)
import bagua.torch as bagua

bagua.init(bucket_mb=0.013)  # of two parameters
side, main = core.PretendedStream(), core.PretendedStream()
zero, one, done = torch.zeros(1), torch.ones(1), torch.zeros(1)


def work(stream):
    "Is done after a while, and not before."
    done.zero_()
    for what in [zero] * 60 + [one]:
        stream.copy(done.data_ptr(), what.data_ptr(), 4)


a, b, last = (torch.nn.Parameter(torch.ones(40, 40)) for _ in range(3))
sgd = torch.optim.SGD([a, b, last], lr=0.1)
named = [("a", a), ("b", b), ("last", last)]
optimizer = bagua.DistributedOptimizer(sgd, named, algorithm=sys.argv[1])


def backward():
    # What comes last in forward comes first here.
    (last.square().sum() + b.square().sum() + a.square().sum()).backward()


for _ in range(3):
    optimizer.zero_grad()
    backward()
    optimizer.step()

looked = []


def begin_a(_):
    side.use()
    if late is side:
        work(side)


def begin_b(_):
    main.use()
    if late is main:
        work(main)


def look(_):
    "The exchange of both has begun, and nobody has waited for it."
    assert done == 0, "it was waited for"
    if late is side:
        main.drain()  # what is exchanged comes after all that brought it,
    else:
        side.drain()  # and what their memory is used for next comes after that
    looked.append(float(done))


a.register_hook(begin_a)
b.register_hook(begin_b)
b.register_post_accumulate_grad_hook(look)
for late in (side, main):
    optimizer.zero_grad()
    backward()
    main.drain()
    optimizer.step()
    main.drain()
print(looked)
"""


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "powersgd"])
def test_streams_wait_for_each_other(run_ranks, algorithm):
    result = run_ranks(1, PROGRAM, algorithm)
    assert result.stdout == ["[1.0, 1.0]\n"], result
