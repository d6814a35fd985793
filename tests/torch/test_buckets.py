"""Gradients in arenas, which users may take elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua.torch.arrays import is_on_device

pytestmark = pytest.mark.ranks(1, 2, 3)
# What users do with gradients that they have got, and what torch does when a model is converted.
REPLACED = {
    "data": lambda p: setattr(p.grad, "data", p.grad.data.clamp(-1e9, 1e9)),
    "grad": lambda p: setattr(p, "grad", p.grad.clone()),
    "there and back": lambda p: setattr(p.grad, "data", p.grad.data.double().float()),
    "other strides": lambda p: setattr(p.grad, "data", p.grad.data.T.contiguous().T),
    "shared": lambda p: p.grad.share_memory_(),
    "resized": lambda p: p.grad.resize_(1).fill_(7.0),
}


@pytest.mark.parametrize("how", list(REPLACED))
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "powersgd"])
@pytest.mark.parametrize("size", [4, 600])
@pytest.mark.parametrize("zeroes", [True, False])
def test_gradients_that_users_have_moved(everyone, hvd, how, algorithm, size, zeroes):
    params = [nn.Parameter(torch.zeros(size, size)), nn.Parameter(torch.zeros(3, 2))]
    if how == "shared" and is_on_device(params[0]):
        pytest.skip("a device's memory stays where it is")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), algorithm=algorithm)
    for step in range(5):
        optimizer.zero_grad(set_to_none=zeroes)
        weight = float(10**step) * (everyone.me + 1)
        sum((param * weight).sum() for param in params).backward()
        mean = 10**step * (everyone.size + 1) / 2
        for param in params:
            torch.testing.assert_close(param.grad, torch.full_like(param, mean), rtol=1e-4, atol=0)
        optimizer.step()
        if how != "resized" or zeroes:
            REPLACED[how](params[step % 2])
