from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from bagua.common.world import world

pytestmark = pytest.mark.ranks(1, 3)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_floating_tensors_travel_in_two_bytes_per_value(everyone, hvd, name):
    compression = getattr(hvd.Compression, name)
    tensors = everyone.draw((50,))
    wire = [compression.compress(tensor)[0] for tensor in tensors]
    assert wire[0].dtype == compression.wire_dtype
    assert wire[0].element_size() == 2
    expected = everyone.reduced(wire, hvd.Average).float()
    result = hvd.allreduce(tensors[everyone.me], compression=compression)
    assert result.dtype == torch.float32
    assert_close(result, expected, rtol=1e-2, atol=1e-2)
    if everyone.size == 1:
        assert torch.equal(result, tensors[0].to(compression.wire_dtype).float())
    grouped = hvd.grouped_allreduce([tensors[everyone.me]], compression=compression)
    assert torch.equal(grouped[0], result)
    shares = hvd.reducescatter(tensors[everyone.me], compression=compression)
    assert_close(shares, everyone.share(expected), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_integers_pass_through(everyone, hvd, name):
    tensors = everyone.draw((50,), torch.int32)
    result = hvd.allreduce(
        tensors[everyone.me], op=hvd.Sum, compression=getattr(hvd.Compression, name)
    )
    assert torch.equal(result, everyone.reduced(tensors, hvd.Sum))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_wide_floats_come_back_wide(everyone, hvd, name):
    """As what two bytes hold of them; complex numbers pass through."""
    compression = getattr(hvd.Compression, name)
    tensors = everyone.draw((50,), torch.float64)
    wire = [tensor.to(compression.wire_dtype) for tensor in tensors]
    expected = everyone.reduced(wire, hvd.Average)
    for result in (
        hvd.allreduce(tensors[everyone.me], compression=compression),
        *hvd.grouped_allreduce([tensors[everyone.me]], compression=compression),
    ):
        assert result.dtype == torch.float64
        assert torch.equal(result, expected.double())
    tensors = everyone.draw((50,), torch.complex64)
    result = hvd.allreduce(tensors[everyone.me], compression=compression)
    assert_close(result, everyone.reduced(tensors, hvd.Average))


@pytest.mark.parametrize("wish", ["off", "report"])
def test_a_compressor_that_fails_on_one_rank(everyone, hvd, monkeypatch, wish):
    monkeypatch.setattr(world(), "config", dataclasses.replace(world().config, check_finite=wish))
    last = everyone.me == everyone.size - 1

    class Fails(hvd.Compressor):
        armed, calls = False, 0

        @classmethod
        def compress(cls, tensor):
            cls.calls += 1
            if cls.armed and last and cls.calls % 3 == 2:
                raise ArithmeticError("on purpose")
            return tensor, None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor

    params = [torch.nn.Parameter(torch.zeros(10)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), compression=Fails)
    for step in range(4):
        optimizer.zero_grad()
        Fails.armed, Fails.calls = step == 1, 0
        loss = sum((everyone.me + 1) * param.sum() for param in params)
        if step == 1:
            error, words = (ArithmeticError, "purpose") if last else (hvd.UsageError, "on purpose")
            with pytest.raises(error, match=words):
                loss.backward()
            continue
        loss.backward()
        for param in params:
            assert (param.grad == (everyone.size + 1) / 2).all()
        optimizer.step()


def test_a_compressor_of_the_users_own(everyone, hvd):
    class Halves(hvd.Compressor):
        @staticmethod
        def compress(tensor):
            return tensor[: len(tensor) // 2], len(tensor)

        @staticmethod
        def decompress(tensor, ctx):
            return torch.cat([tensor, tensor.new_zeros(ctx - len(tensor))])

    class Scaled(hvd.Compression.fp16):
        @classmethod
        def compress(cls, tensor):
            return super().compress(tensor * 0.5)

    tensors = everyone.draw((10,))
    expected = everyone.reduced(tensors, hvd.Average)
    expected[5:] = 0
    assert_close(hvd.allreduce(tensors[everyone.me], compression=Halves), expected)
    assert Halves.custom
    assert Scaled.custom  # a bucket must not mistake it for the cast it extends
    assert not hvd.Compression.fp16.custom
    with pytest.raises(NotImplementedError):
        hvd.allreduce(tensors[everyone.me], compression=hvd.Compressor)
