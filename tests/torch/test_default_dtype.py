"""torch's default element type is the user's own business: what is made here has its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua.algorithms import (
    Algorithm,
    ByteGrad,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
    TopK,
)

pytestmark = pytest.mark.ranks(2, 3)

ALGORITHMS = [
    Algorithm(),
    Algorithm(codec="sign1"),
    ByteGrad(hierarchical=False),
    TopK(hierarchical=False, density=0.1),
    TopK(momentum_correction=0.9, density=0.1),
    PowerSGD(warmup_steps=1, low_rank=1),
    Decentralized(hierarchical=False),
    LowPrecisionDecentralized(hierarchical=False),
    LocalSGD(every=2),
    LocalSGD(every=2, when="forward", codec="minmax_u8", error_feedback=True),
    DiLoCo(every=2),
]


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default(request):
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


def trained(hvd, algorithm: Algorithm) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 24), (24,), (24, 3)]
    f32 = {"dtype": torch.float32}
    params = [nn.Parameter(torch.randn(shape, generator=generator, **f32)) for shape in shapes]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.05), algorithm=algorithm)
    generator.manual_seed(100 + hvd.rank())
    first, bias, last = params
    for _ in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(8, 16, generator=generator, **f32)
        ((inputs @ first + bias).tanh() @ last).square().mean().backward()
        optimizer.step()
    optimizer.settle()
    return torch.cat([param.detach().flatten() for param in params])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_nothing_depends_on_it(hvd, default, algorithm):
    usual = trained(hvd, algorithm)
    default()
    assert torch.equal(trained(hvd, algorithm), usual)
