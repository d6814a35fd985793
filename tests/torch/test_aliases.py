"""Gradients whose memory is also somebody else's: autograd gives views where it can.

An exchange must neither read what another one has written nor write what somebody still reads.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.parametrize("width", [5, 3000, 200000]),
    pytest.mark.usefixtures("overlap"),
]


def parameter(width: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(2 * width))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view, so that its gradient is one of the gradient of what it is used in."""
    return tensor.view(2, -1).view(-1)


def summing(hvd, *params: nn.Parameter, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum, **options)


def total(everyone) -> float:
    """The sum over ranks of their number from 1."""
    return float(sum(range(1, everyone.size + 1)))


def assert_all(tensor: torch.Tensor | None, value: float) -> None:
    assert tensor is not None
    torch.testing.assert_close(tensor.detach(), torch.full_like(tensor, value))


@pytest.mark.parametrize("optimizer_count", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_that_share_memory(everyone, hvd, width, groups, optimizer_count):
    """Autograd gives both parameters views of one tensor, which must not be exchanged twice."""
    params = [parameter(width) for _ in range(2)]
    optimizers = [
        summing(hvd, *part, num_groups=groups)
        for part in ([params] if optimizer_count == 1 else [params[:1], params[1:]])
    ]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ((flat(params[0]) + flat(params[1])) * (everyone.me + 1)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for param in params:
        assert_all(param, -3 * total(everyone))


def test_on_some_ranks_only(everyone, hvd, width):
    """With a cast, results must not be written over each other."""
    a, b = parameter(width), parameter(width)
    optimizer = summing(hvd, a, b, compression=hvd.Compression.fp16)
    for _ in range(2):
        optimizer.zero_grad()
        (flat(a) + flat(b) if everyone.me == 0 else a + 5 * b).sum().backward()
        assert_all(a.grad, everyone.size)
        assert_all(b.grad, 1 + 5 * (everyone.size - 1))


def test_of_a_parameter_nobody_exchanges(everyone, hvd, width):
    for options in ({}, {"compression": hvd.Compression.fp16}):
        ours, theirs = parameter(width), parameter(width)
        optimizer = summing(hvd, ours, parameter(3), **options)  # one has no gradient
        for _ in range(2):
            optimizer.zero_grad()
            theirs.grad = None
            ((flat(ours) + flat(theirs)) * (everyone.me + 1)).sum().backward()
            assert_all(ours.grad, total(everyone))
            assert_all(theirs.grad, everyone.me + 1)


def test_of_what_the_rest_of_a_backward_reads(everyone, hvd, width):
    """The inner backward of a reentrant checkpoint ends while the outer one goes on."""
    inner, outer = parameter(width), nn.Parameter(torch.ones(2 * width))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([inner, outer], lr=0.0))
    for _ in range(2):
        optimizer.zero_grad()
        scaled = outer * (everyone.me + 1)
        result = checkpoint(lambda x: flat(x) + flat(inner), scaled, use_reentrant=True)
        (result * (everyone.me + 1)).sum().backward()
        assert_all(outer.grad, sum(r * r for r in range(1, everyone.size + 1)) / everyone.size)


def test_left_for_the_step(everyone, hvd, width):
    params = [parameter(width), parameter(width)]
    optimizers = [summing(hvd, param) for param in params]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with optimizers[0].no_sync(), optimizers[1].no_sync():
            ((flat(params[0]) + flat(params[1])) * (everyone.me + 1)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for param in params:
        assert_all(param, -2 * total(everyone))


def test_of_the_users_own_tensors(everyone, hvd, width):
    mine = torch.full((2 * width,), float(everyone.me + 1))
    param, kept = parameter(width), []
    optimizer = summing(hvd, param)
    for _ in range(3):
        optimizer.zero_grad()
        flat(param).backward(mine)
        optimizer.step()
        view = flat(param)
        view.register_hook(kept.append)
        (view * 2.0 * (everyone.me + 1)).sum().backward()
        optimizer.zero_grad()
    assert_all(mine, everyone.me + 1)
    assert_all(param, -3 * total(everyone))
    for gradient in kept:
        assert_all(gradient, 2 * (everyone.me + 1))


def test_of_one_tensor_given_to_two_parameters(everyone, hvd, width):
    params = [parameter(width), parameter(width)]
    for groups in (1, 2):
        optimizer = summing(hvd, *params, num_groups=groups)
        for param in params:
            param.grad = None
        params[0].grad = params[1].grad = torch.full((2 * width,), float(everyone.me + 1))
        optimizer.step()
    for param in params:
        assert_all(param, -2 * total(everyone))


def test_of_one_parameters_result_given_to_another(everyone, hvd, width):
    params = [parameter(width), parameter(width), parameter(3)]
    optimizer = summing(hvd, *params)
    for _ in range(2):  # results lie in the arena from now on
        optimizer.zero_grad(set_to_none=False)
        sum(param.sum() for param in params).backward()
    optimizer.zero_grad(set_to_none=False)
    with optimizer.no_sync():
        (params[0] * (everyone.me + 1)).sum().backward()
    params[1].grad = params[0].grad
    optimizer.synchronize()
    for param in params[:2]:
        assert_all(param.grad, total(everyone))


def test_results_that_are_computed_with_while_another_changes(everyone, hvd, width):
    params = [parameter(width), parameter(3)]
    optimizer = summing(hvd, *params)
    for _ in range(2):
        optimizer.zero_grad()
        sum(param.sum() for param in params).backward()
    factor = torch.ones(6, requires_grad=True)
    product = (params[1].grad * factor).sum()
    params[0].grad.mul_(0.5)
    product.backward()
    assert_all(factor.grad, everyone.size)


def test_after_an_exchange_that_was_refused(everyone, hvd, width):
    """Nothing that was planned for it is used later."""
    late = nn.Parameter(torch.zeros(10, 100))
    first, second, third = (parameter(width) for _ in range(3))
    groups = [[late, first], [second, third]]
    params = (third, second, first, late)
    optimizer = summing(hvd, *params, groups=groups)
    for _ in range(2):
        optimizer.zero_grad()
        (((third + second + first) * (everyone.me + 1)).sum() + late.sum()).backward()
        optimizer.zero_grad()
    rows = nn.functional.embedding(torch.arange(3), late, sparse=True)
    with pytest.raises(hvd.UsageError, match="sparse gradient"):
        ((second * 10).sum() + rows.sum()).backward()
    optimizer.zero_grad()
    (((third + second + first) * 100 * (everyone.me + 1)).sum() + late.sum()).backward()
    for param in (first, second, third):
        assert_all(param.grad, 100 * total(everyone))


@pytest.mark.parametrize("part", ["all", "half"])
def test_tensors_of_one_group(everyone, hvd, width, part):
    """Tied weights in a state_dict, say; on one rank only, too."""
    for aliased in (True, everyone.me == 0):
        whole = torch.full((2 * width,), everyone.me + 1.0)
        other = flat(whole) if part == "all" else whole[width:]
        tensors = [whole, other if aliased else other.clone()]
        hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        for tensor in tensors:
            assert_all(tensor, total(everyone))
