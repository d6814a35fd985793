"""SyncBatchNorm against nn.BatchNorm of the concatenated batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

BATCHES = {
    "even": lambda rank: 3,
    "uneven": lambda rank: rank + 2,
    "some empty": lambda rank: 4 if rank % 2 == 0 else 0,
}
SHAPES = {"2d": (), "3d": (5,), "4d": (3, 2), "5d": (2, 2, 2)}
PLAIN = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def pair(hvd, rest, dtype=torch.float64, **options):
    """Ours and plain torch's, with the same parameters."""
    plain = PLAIN[len(rest)](6, **options).to(dtype)
    if plain.affine:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(torch.randn(6, generator=generator) + 0.5)
    ours = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert type(ours) is hvd.SyncBatchNorm
    return ours, plain


def compare(everyone, hvd, ours, plain, rest, rows, dtype=torch.float64, **tolerance):
    """One step forward and backward on both."""
    inputs = [t * 3 + 5 for t in everyone.draw(lambda rank: (rows(rank), 6, *rest), dtype)]
    upstream = everyone.draw(lambda rank: (rows(rank), 6, *rest), dtype, seed=1)
    sizes = [len(tensor) for tensor in inputs]
    x = inputs[everyone.me].clone().requires_grad_()
    whole = torch.cat(inputs).requires_grad_()
    y, expected = ours(x), plain(whole)
    assert y.dtype == expected.dtype
    assert_close(y, expected.split(sizes)[everyone.me], **tolerance)
    for module in (ours, plain):
        module.zero_grad()
    y.backward(upstream[everyone.me])
    expected.backward(torch.cat(upstream))
    assert_close(x.grad, whole.grad.split(sizes)[everyone.me], **tolerance)
    if plain.affine:
        for mine, theirs in zip(ours.parameters(), plain.parameters()):
            total = hvd.allreduce(mine.grad, op=hvd.Sum)
            assert_close(total, theirs.grad, **tolerance)
    for mine, theirs in zip(ours.buffers(), plain.buffers()):
        assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize("batch", list(BATCHES))
def test_training(everyone, hvd, batch):
    for rest in SHAPES.values():
        ours, plain = pair(hvd, rest)
        for _ in range(3):
            compare(everyone, hvd, ours, plain, rest, BATCHES[batch])


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"momentum": None},
        {"momentum": 0.3, "eps": 0.1},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_options(everyone, hvd, options):
    ours, plain = pair(hvd, (3, 2), **options)
    for _ in range(3):
        compare(everyone, hvd, ours, plain, (3, 2), BATCHES["uneven"])
    ours.eval()
    plain.eval()
    compare(everyone, hvd, ours, plain, (3, 2), BATCHES["uneven"])


def test_evaluation_exchanges_nothing(everyone, hvd):
    ours, plain = pair(hvd, (3, 2))
    compare(everyone, hvd, ours, plain, (3, 2), BATCHES["even"])
    ours.eval()
    plain.eval()
    x = everyone.draw((2, 6, 3, 2), torch.float64)[everyone.me]
    before = hvd.counters()["exchanges"]
    assert_close(ours(x), plain(x))
    assert hvd.counters()["exchanges"] == before


def test_float32(everyone, hvd):
    ours, plain = pair(hvd, (3, 2), torch.float32)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    compare(everyone, hvd, ours, plain, (3, 2), BATCHES["uneven"], torch.float32, **tolerance)


def test_bfloat16_input_of_a_float32_module(everyone, hvd):
    ours, plain = pair(hvd, (3, 2), torch.float32)
    tolerance = {"rtol": 3e-2, "atol": 6e-2}
    compare(everyone, hvd, ours, plain, (3, 2), BATCHES["uneven"], torch.bfloat16, **tolerance)
    assert ours.running_mean.dtype == torch.float32


def test_channels_last_input(everyone, hvd):
    ours, plain = pair(hvd, (3, 2))
    inputs = everyone.draw((2, 6, 3, 2), torch.float64)
    x = inputs[everyone.me].to(memory_format=torch.channels_last)
    assert_close(ours(x), plain(torch.cat(inputs))[2 * everyone.me : 2 * everyone.me + 2])


def test_a_large_mean_does_not_cancel(everyone, hvd):
    ours, plain = pair(hvd, (3, 2), torch.float32, affine=False)
    inputs = [tensor + 1000 for tensor in everyone.draw((4, 6, 3, 2))]
    expected = plain.double()(torch.cat(inputs).double()).split(4)[everyone.me]
    assert_close(ours(inputs[everyone.me]).double(), expected, rtol=1e-3, atol=2e-3)


def test_too_few_values_are_refused_on_every_rank(everyone, hvd):
    ours, _ = pair(hvd, ())
    with pytest.raises(ValueError, match=r"at least 2|more than 1 value"):
        ours(torch.ones(1 if everyone.me == 0 else 0, 6, dtype=torch.float64))
    assert hvd.allreduce(torch.ones(1)).item() == 1


def test_wrong_inputs(hvd):
    ours, _ = pair(hvd, ())
    with pytest.raises(ValueError, match="batch, channels"):
        ours(torch.ones(6))
    with pytest.raises(ValueError, match="6 channels"):
        ours(torch.ones(2, 5))


def test_conversion_of_a_model(everyone, hvd):
    shared = nn.BatchNorm1d(4)
    model = nn.ModuleDict(
        {
            "block": nn.Sequential(nn.Linear(3, 4), shared, nn.ReLU()),
            "again": shared,
            "instance": nn.InstanceNorm1d(4, affine=True),
            "frozen": nn.BatchNorm2d(2).eval(),
        }
    )
    state = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    everywhere = hvd.global_process_set
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model, everywhere)
    assert converted is model
    assert isinstance(model["block"][1], hvd.SyncBatchNorm)
    assert model["again"] is model["block"][1]
    assert type(model["instance"]) is nn.InstanceNorm1d
    assert not model["frozen"].training
    assert model["again"].process_set is everywhere
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == state


@pytest.mark.ranks(3, 4)
def test_in_a_process_set(everyone, hvd):
    process_set = hvd.add_process_set([0, 2])
    if everyone.me in (0, 2):
        plain = nn.BatchNorm1d(6).double()
        ours = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), process_set)
        inputs = everyone.draw((3, 6), torch.float64)
        whole = torch.cat([inputs[0], inputs[2]]).requires_grad_()
        x = inputs[everyone.me].clone().requires_grad_()
        place = slice(0, 3) if everyone.me == 0 else slice(3, 6)
        y, expected = ours(x), plain(whole)
        assert_close(y, expected[place])
        (y**2).sum().backward()
        (expected**2).sum().backward()
        assert_close(x.grad, whole.grad[place])
        assert_close(ours.running_var, plain.running_var)
    hvd.remove_process_set(process_set)
