"""Gradients of the out-of-place operations against what plain torch makes of all ranks' ones."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing import assert_close

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(params=["float32", "complex64", "bfloat16"])
def dtype(request):
    return getattr(torch, request.param)


def leaf(tensors, everyone):
    return tensors[everyone.me].clone().requires_grad_()


def test_allreduce(everyone, hvd, dtype):
    x = leaf(everyone.draw((4, 3), dtype), everyone)
    upstream = everyone.draw((4, 3), dtype, seed=1)
    for op in (hvd.Sum, hvd.Average):
        y = hvd.allreduce(x, op=op, prescale_factor=2.0, postscale_factor=0.25, name="reduced")
        assert y.requires_grad
        (grad,) = torch.autograd.grad(y, x, upstream[everyone.me])
        assert_close(grad, everyone.reduced(upstream, op, 2.0, 0.25))


def test_grouped_allreduce(everyone, hvd):
    x = leaf(everyone.draw((4, 3)), everyone)
    z = leaf(everyone.draw((2,), torch.float64), everyone)
    counts = torch.tensor([everyone.me])  # integers have no gradient
    results = hvd.grouped_allreduce([x, counts, z], op=hvd.Sum, compression=hvd.Compression.none)
    assert [result.requires_grad for result in results] == [True, False, True]
    upstream = everyone.draw((4, 3), seed=1)
    loss = (results[0] * upstream[everyone.me]).sum() + 3 * results[2].sum()
    loss.backward()
    assert_close(x.grad, everyone.reduced(upstream, hvd.Sum))
    assert_close(z.grad, torch.full_like(z, 3.0 * everyone.size))


def test_gradient_passes_through_compression(everyone, hvd):
    x = leaf(everyone.draw((4, 3)), everyone)
    upstream = everyone.draw((4, 3), seed=1)
    y = hvd.allreduce(x, compression=hvd.Compression.bf16)
    assert y.dtype == torch.float32
    y.backward(upstream[everyone.me])
    expected = everyone.reduced([tensor.bfloat16() for tensor in upstream], hvd.Average)
    assert_close(x.grad, expected.float(), rtol=1e-2, atol=1e-2)


def test_allgather(everyone, hvd, dtype):
    rows = [(rank + 2) % 3 for rank in everyone.ranks]  # 2, 0, 1, 2
    x = leaf(everyone.draw(lambda rank: (rows[rank], 3), dtype), everyone)
    upstream = everyone.draw((sum(rows), 3), dtype, seed=1)
    mean = everyone.reduced(upstream, hvd.Average).split(rows)
    y = hvd.allgather(x)
    y.backward(upstream[everyone.me])
    assert_close(x.grad, mean[everyone.me])


def test_grouped_allgather_and_scalars(everyone, hvd):
    x = torch.tensor(float(everyone.me), requires_grad=True)
    z = leaf(everyone.draw((2, 2)), everyone)
    a, b = hvd.grouped_allgather([x, z], name="gathered")
    assert a.shape == (everyone.size,)
    ((a * (everyone.me + 1)).sum() + (b * (everyone.me + 1)).sum()).backward()
    mean = sum(rank + 1 for rank in everyone.ranks) / everyone.size
    assert_close(x.grad, torch.tensor(mean))
    assert_close(z.grad, torch.full((2, 2), mean))


def test_broadcast(everyone, hvd, dtype):
    upstream = everyone.draw((4, 3), dtype, seed=1)
    for root in everyone.ranks:
        x = leaf(everyone.draw((4, 3), dtype), everyone)
        hvd.broadcast(x, root).backward(upstream[everyone.me])
        mean = everyone.reduced(upstream, hvd.Average)
        assert_close(x.grad, mean if everyone.me == root else torch.zeros_like(mean))


def test_alltoall(everyone, hvd, dtype):
    n, me = everyone.size, everyone.me
    splits = [[(sender + 2 * receiver) % 3 for receiver in range(n)] for sender in range(n)]
    received = [[splits[sender][receiver] for sender in range(n)] for receiver in range(n)]
    x = leaf(everyone.draw(lambda rank: (sum(splits[rank]), 2), dtype), everyone)
    upstream = everyone.draw(lambda rank: (sum(received[rank]), 2), dtype, seed=1)
    y, counts = hvd.alltoall(x, torch.tensor(splits[me]))
    assert counts.tolist() == received[me]
    y.backward(upstream[me])
    back = [tensor.split(received[rank])[me] for rank, tensor in enumerate(upstream)]
    assert_close(x.grad, torch.cat(back))


def test_alltoall_without_splits(everyone, hvd):
    n, me = everyone.size, everyone.me
    x = leaf(everyone.draw((2 * n, 2)), everyone)
    upstream = everyone.draw((2 * n, 2), seed=1)
    hvd.alltoall(x).backward(upstream[me])
    assert_close(x.grad, torch.cat([tensor[2 * me : 2 * me + 2] for tensor in upstream]))


def test_reducescatter(everyone, hvd, dtype):
    rows = everyone.size + 1
    upstream = [everyone.share(torch.empty(rows, 3), rank).shape for rank in everyone.ranks]
    upstream = everyone.draw(lambda rank: tuple(upstream[rank]), dtype, seed=1)
    for op, factor in ((hvd.Average, 1), (hvd.Sum, everyone.size)):
        x = leaf(everyone.draw((rows, 3), dtype), everyone)
        y = hvd.reducescatter(x, op=op, prescale_factor=0.5, postscale_factor=4.0)
        y.backward(upstream[everyone.me])
        assert_close(x.grad, torch.cat(upstream) * 2 * factor)


def test_a_gradient_has_a_gradient(everyone, hvd):
    x = leaf(everyone.draw((3,)), everyone)
    total = hvd.allreduce(x, op=hvd.Sum)
    (grad,) = torch.autograd.grad((total**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    # grad = n * 3 t^2, so d(sum grad)/dx = sum over ranks of n * 6 t
    value = everyone.reduced(everyone.draw((3,)), hvd.Sum)
    assert_close(second, 6 * value * everyone.size**2)


def test_other_reductions_refuse_backward(everyone, hvd):
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        x = leaf(everyone.draw((3,)), everyone)
        y = hvd.allreduce(x, op=op)
        with pytest.raises(ValueError, match="has no gradient"):
            y.sum().backward()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tangent_is_not_lost(everyone, hvd, requires_grad):
    rows = 2 * everyone.size
    operations = [
        hvd.allreduce,
        hvd.allgather,
        hvd.reducescatter,
        hvd.alltoall,
        lambda x: hvd.broadcast(x, 0),
        lambda x: hvd.grouped_allreduce([x]),
    ]
    for operation in operations:
        with forward_ad.dual_level():
            x = torch.ones(rows, requires_grad=requires_grad)
            dual = forward_ad.make_dual(x, torch.ones(rows))
            with pytest.raises(NotImplementedError, match="forward mode"):
                operation(dual)
            operation(torch.ones(rows))  # has none


def test_nothing_is_tracked_without_need(everyone, hvd):
    x = leaf(everyone.draw((4,)), everyone)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
        assert not hvd.allgather(x).requires_grad
    assert not hvd.allreduce(x.detach()).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad


IN_PLACE = {
    "allreduce_": lambda hvd, b: hvd.allreduce_(b, op=hvd.Sum),
    "allreduce_async_": lambda hvd, b: hvd.allreduce_async_(b, op=hvd.Max).wait(),
    "scaled": lambda hvd, b: hvd.allreduce_(b, postscale_factor=2.0),
    "grouped_allreduce_": lambda hvd, b: hvd.grouped_allreduce_([torch.ones(2), b], op=hvd.Sum),
    "broadcast_": lambda hvd, b: hvd.broadcast_(b, 0),
    "broadcast_async_": lambda hvd, b: hvd.broadcast_async_(b, 0).wait(),
    "grouped_broadcast_": lambda hvd, b: hvd.grouped_broadcast_([b], 0),
}


@pytest.mark.parametrize("operation", IN_PLACE.values(), ids=IN_PLACE)
def test_backward_through_an_in_place_operation_is_an_error(hvd, operation):
    for changed in (lambda b: b, lambda b: b.t(), lambda b: b[1]):
        a = torch.ones((3, 2), requires_grad=True)
        b = a * 2
        view = changed(b)
        operation(hvd, view)
        for result in (b, view):
            with pytest.raises(hvd.UsageError, match="without the underscore"):
                (result * 3).sum().backward()
        assert a.grad is None


def test_backward_through_an_average_in_place_is_warned_of(hvd):
    a = torch.ones(3, requires_grad=True)
    loss = (a * 2).sum()
    hvd.allreduce_(loss)
    with pytest.warns(UserWarning, match="without the underscore"):
        loss.backward()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("operation", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_operations_on_what_backward_does_not_go_through(hvd, operation):
    a = torch.ones(3, requires_grad=True)
    loss = (a * 2).sum()
    loss.backward()
    operation(hvd, loss)  # to be printed
    assert a.grad.tolist() == [2, 2, 2]
    operation(hvd, a)  # a leaf, as parameters are
    operation(hvd, a[1:])
    b = a * 2
    operation(hvd, b.detach())
    b.sum().backward()
    c = a * 2
    with torch.no_grad():
        operation(hvd, c)
    c.sum().backward()
    assert a.grad.tolist() == [6, 6, 6]
