"""Averages of weights with one peer, of more values than are on their way at a time."""

import pytest
import torch

from bagua.algorithms import Algorithm
from gpu.sharing import has_nccl

COUNT = 8 * 2**20 + 3  # as floats of 32 bits, which those of 16 travel as, more than 32 MB


def given(rank):
    """Numbers of which all types hold the mean of any two."""
    return torch.arange(COUNT) * (2 * rank + 1) % 17 - 8 + rank


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("peers", "dtype"),
    [
        ("shift_one", torch.float32),
        ("exponential", torch.float32),
        ("ring", torch.float32),
        ("ring", torch.bfloat16),
    ],
    ids=lambda value: str(value).replace("torch.", ""),
)
def test_of_many_values(hvd, gpu, peers, dtype):
    weight = torch.nn.Parameter(torch.zeros(COUNT, dtype=dtype, device=gpu))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1),
        [("weight", weight)],
        algorithm=Algorithm(what="weight", peers=peers, when="step"),
    )
    for _ in range(2):
        before = hvd.counters()["touched_nbytes"]
        optimizer.zero_grad()
        weight.grad = -given(hvd.rank()).to(device=gpu, dtype=dtype)
        optimizer.step()
    touched = hvd.counters()["touched_nbytes"] - before  # by the host
    assert (touched < COUNT) == has_nccl(hvd)
    assert torch.equal(weight.detach().cpu().float(), (given(0) + given(1)).float())
