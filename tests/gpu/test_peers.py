"""Averages of weights with one peer, of more values than are on their way at a time."""

import pytest
import torch

from bagua.algorithms import Algorithm

MB = 1 << 20


def given(hvd, count, rank):
    """Numbers of which all types hold the mean of any two."""
    return torch.arange(count) * (2 * rank + 1) % 17 - 8 + rank


@pytest.mark.ranks(2)
@pytest.mark.parametrize("peers", ["shift_one", "exponential", "ring"])
@pytest.mark.parametrize(
    ("dtype", "count"),
    [(torch.float32, 8 * MB + 3), (torch.float16, 16 * MB + 5), (torch.bfloat16, 16 * MB + 1)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_of_many_values(hvd, gpu, peers, dtype, count):
    weight = torch.nn.Parameter(torch.zeros(count, dtype=dtype, device=gpu))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1),
        [("weight", weight)],
        algorithm=Algorithm(what="weight", peers=peers, when="step"),
    )
    for _ in range(2):
        optimizer.zero_grad()
        weight.grad = -given(hvd, count, hvd.rank()).to(device=gpu, dtype=dtype)
        optimizer.step()
    mean = (given(hvd, count, 0) + given(hvd, count, 1)).float()  # twice: of two steps
    assert torch.equal(weight.detach().cpu().float(), mean)
