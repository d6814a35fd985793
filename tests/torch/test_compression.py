from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from bagua.algorithms import Algorithm, ByteGrad
from bagua.algorithms.exchange import CODECS, LOSSY
from bagua.common.world import world

pytestmark = pytest.mark.ranks(1, 2, 3)


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
        eps = torch.finfo(compression.wire_dtype).eps * 4 if everyone.shows_memory else 0
        assert_close(result, expected.double(), atol=eps, rtol=eps)
    tensors = everyone.draw((50,), torch.complex64)
    result = hvd.allreduce(tensors[everyone.me], compression=compression)
    assert_close(result, everyone.reduced(tensors, hvd.Average))


# Of the largest value.
WITHIN = {
    "raw": 1e-2,
    "fp16": 1e-2,
    "bf16": 2e-2,
    "minmax_u8": 0.02,
    "minmax_u4": 0.2,
    "fp8_e4m3": 0.06,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_carries_an_allreduce(everyone, hvd, codec, dtype):
    compression = getattr(hvd.Compression, codec)
    tensors = [tensor.to(dtype) for tensor in everyone.draw((300, 7), torch.float32)]
    mine, expected = tensors[everyone.me], everyone.reduced(tensors, hvd.Average)
    before, sent = mine.clone(), [hvd.counters()["sent_nbytes"]]
    result = hvd.allreduce(mine, compression=compression)
    sent.append(hvd.counters()["sent_nbytes"])
    assert torch.equal(mine, before)
    assert (result.shape, result.dtype) == (mine.shape, dtype)
    assert all(torch.equal(result, theirs) for theirs in hvd.allgather_object(result))
    largest = expected.abs().max()
    if codec in WITHIN:
        assert (result - expected).abs().max() <= WITHIN[codec] * largest
    if codec == "sign1":
        assert torch.nn.functional.cosine_similarity(result.flatten(), expected.flatten(), 0) > 0.4
    if codec == "topk" and everyone.size > 1:
        assert 0 < result.count_nonzero() < result.numel() / 4
    hvd.allreduce(mine)
    sent.append(hvd.counters()["sent_nbytes"])
    by_codec, exactly = sent[1] - sent[0], sent[2] - sent[1]
    if codec in LOSSY and exactly:  # else memory is shared
        assert by_codec < 0.7 * exactly
    both = hvd.grouped_allreduce([mine, mine[:2] * 1e6], compression=compression)
    assert [(one.shape, one.dtype) for one in both] == [((300, 7), dtype), ((2, 7), dtype)]
    assert torch.equal(both[0], result)  # whatever goes with it
    both[0].zero_()
    assert hvd.grouped_allreduce([], compression=compression) == []
    for odd in (mine.t(), mine[0, 0], mine[:0]):
        assert hvd.allreduce(odd, compression=compression).shape == odd.shape
    tracked = mine.clone().requires_grad_()
    hvd.allreduce(tracked, compression=compression, op=hvd.Sum).sum().backward()
    assert (tracked.grad == everyone.size).all()  # exact


def test_what_a_codec_cannot_carry(everyone, hvd):
    minmax = hvd.Compression.minmax_u8
    ints = everyone.me == everyone.size - 1
    tensor = torch.ones(3, dtype=torch.int32 if ints else torch.float32)
    with pytest.raises(hvd.UsageError, match="minmax_u8 is for floats, not int32"):
        hvd.allreduce(tensor, compression=minmax, name="ints")
    with pytest.raises(hvd.UsageError, match="max cannot use a codec"):
        hvd.allreduce(torch.ones(3), compression=minmax, op=hvd.Max)
    with pytest.raises(hvd.UsageError, match="minmax_u8 is for allreduces"):
        hvd.reducescatter(torch.ones(3), compression=minmax)
    if everyone.size > 1:
        shape = (2, 3) if everyone.me == 0 else (3, 2)
        with pytest.raises(hvd.UsageError, match="shape"):
            hvd.allreduce(torch.ones(shape), compression=minmax, name="shapes")
    with pytest.raises(AttributeError, match="there are none, fp16, "):
        hvd.Compression.minmax_u9  # noqa: B018


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec in LOSSY])
def test_an_optimizer_takes_a_codec_for_its_algorithms(everyone, hvd, codec):
    def trained(**choice):
        torch.manual_seed(0)
        model = torch.nn.Linear(60, 40)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **choice)
        for step in range(3):
            torch.manual_seed(10 * everyone.me + step)
            optimizer.zero_grad()
            model(torch.randn(4, 60)).square().sum().backward()
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    by_compression = trained(compression=getattr(hvd.Compression, codec))
    by_algorithm = trained(algorithm=Algorithm(codec=codec))
    assert all(torch.equal(a, b) for a, b in zip(by_compression, by_algorithm))
    other = "fp8_e4m3" if codec == "minmax_u8" else "minmax_u8"
    with pytest.raises(hvd.UsageError, match="is a codec; leave it out with ByteGrad"):
        trained(compression=getattr(hvd.Compression, codec), algorithm=ByteGrad(codec=other))


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
