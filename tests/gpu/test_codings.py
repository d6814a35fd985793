"""Codecs on a GPU and on a CPU: every byte and every bit is the same.

But for NaNs that arithmetic has passed: there are many, and processors choose different ones.
Blocks tell of them by one and the same; values that travel one by one may be any. Of finite values
all bytes are the same, by every codec.
"""

from __future__ import annotations

import os

import pytest
import torch

from bagua.common.core import core

CODECS = [("raw",), ("fp16",), ("bf16",), ("minmax_u8",), ("minmax_u4",), ("fp8_e4m3",), ("sign1",)]
CODECS += [("topk", 41, "raw"), ("topk", 1, "fp16"), ("topk", 41, "minmax_u8"), ("topk", 4096)]
CODECS += [("topk", 7, "bf16"), ("topk", 41, "minmax_u4"), ("topk", 41, "fp8_e4m3")]
SEEDS = [*range(4), "fresh"]
COUNTS = [1, 7, 127, 512, 513, 2048 + 31, 100_003]


def seed_of(seed: int | str) -> int:
    if seed == "fresh":
        seed = int.from_bytes(os.urandom(4), "little")
        print("seed", seed)  # of values that did not fail before
    return int(seed)


def hard_values(count: int, seed: int) -> torch.Tensor:
    """Of all magnitudes, with blocks of every awkward kind among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    for number, block in enumerate(values.split(2048)):
        kind = (number + seed) % 8
        if kind == 1:
            block.fill_(-0.375)
        elif kind == 2:
            block[len(block) // 2] = torch.nan
        elif kind == 3:
            block[-1] = -torch.inf
        elif kind in (4, 5):
            block.mul_((1e-42, 3e37)[kind - 4])
        elif kind == 6:
            block.mul_(1e-3).add_(4e6)
        elif kind == 7:
            block.copy_(torch.where(block > 0, 0.0, -0.0))
    return values


def finite_values(count: int, seed: int) -> torch.Tensor:
    values = hard_values(count, seed)
    return torch.where(values.isfinite(), values, -2.5)


def summable_values(count: int, seed: int) -> torch.Tensor:
    """Also as halves: of Infs of both signs the sum would be some NaN."""
    return finite_values(count, seed).clamp(-5e3, 5e3)


def assert_same_values(on_gpu: torch.Tensor, on_cpu: torch.Tensor) -> None:
    on_gpu = on_gpu.cpu()
    assert torch.equal(on_gpu.isnan(), on_cpu.isnan())
    numbers = ~on_cpu.isnan()
    assert torch.equal(on_gpu[numbers].view(torch.int32), on_cpu[numbers].view(torch.int32))


def assert_same_wires(
    coding, codec, on_gpu: torch.Tensor, on_cpu: torch.Tensor, count: int
) -> None:
    """Those that may have NaNs in them by what they say."""
    if codec[0] not in ("raw", "fp16", "bf16", "topk"):
        assert torch.equal(on_gpu.cpu(), on_cpu)
        return
    said = [torch.empty(count) for _ in range(2)]
    for wire, values in zip((on_gpu.cpu(), on_cpu), said):
        coding.decode(wire, values)
    assert_same_values(*said)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", SEEDS)
def test_encodes_and_decodes_alike(codec, count, seed):
    coding = core.Coding(*codec)
    values = hard_values(count, seed_of(seed))
    lost = torch.full((count,), 0.0625)
    for residual in (None, lost):
        wire = torch.zeros(coding.wire_nbytes(count), dtype=torch.uint8)
        gpu_wire, gpu_lost = wire.cuda(), lost.cuda()
        coding.encode(values, wire, residual=residual)
        coding.encode(values.cuda(), gpu_wire, residual=None if residual is None else gpu_lost)
        assert_same_wires(coding, codec, gpu_wire, wire, count)
        if residual is not None:
            assert_same_values(gpu_lost, residual)
        said = torch.empty(count)
        gpu_said = said.cuda()
        coding.decode(wire, said)
        coding.decode(gpu_wire, gpu_said)
        assert_same_values(gpu_said, said)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", SEEDS)
def test_finite_values_become_the_same_bytes(codec, count, seed):
    coding = core.Coding(*codec)
    values, kept = finite_values(count, seed_of(seed)), torch.full((count,), 0.0625)
    for residual, gpu_residual in ((None, None), (kept, kept.cuda())):
        wire = torch.zeros(coding.wire_nbytes(count), dtype=torch.uint8)
        gpu_wire = wire.cuda()
        coding.encode(values, wire, residual=residual)
        coding.encode(values.cuda(), gpu_wire, residual=gpu_residual)
        assert torch.equal(gpu_wire.cpu(), wire)


def at_equal_distances(wires, device):
    stride = -(-wires[0].numel() // 4) * 4  # a wire begins at a multiple of 4 bytes
    rows = torch.zeros(len(wires), stride, dtype=torch.uint8, device=device)
    return [row[: one.numel()].copy_(one) for row, one in zip(rows, wires)]


def averages(coding, wires, count, keeps):
    """By a CPU and by a GPU, with what was lost before: the wire, what it says, what it loses."""
    for device in ("cpu", "cuda"):
        wire = torch.zeros_like(wires[0], device=device)
        values = torch.zeros(count, device=device)
        lost = torch.linspace(-1, 1, count).to(device)
        given = at_equal_distances(wires, device)
        coding.average(given, wire, values, residual=lost if keeps else None)
        yield wire, values, lost


def sums(coding, wires, count):
    for device in ("cpu", "cuda"):
        values = torch.zeros(count, device=device)
        coding.average(at_equal_distances(wires, device), None, values)
        yield values


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("nwires", [1, 2, 3, 8])
@pytest.mark.parametrize("draw", [hard_values, summable_values])
@pytest.mark.parametrize("seed", [0, "fresh"])
def test_adds_up_alike(codec, nwires, draw, seed):
    coding, count = core.Coding(*codec), 100_003
    wires, first = [], seed_of(seed)
    for seed in range(first, first + nwires):
        wire = torch.zeros(coding.wire_nbytes(count), dtype=torch.uint8)
        coding.encode(draw(count, seed), wire)
        wires.append(wire)
    if codec[0] == "topk":
        on_cpu, on_gpu = sums(coding, wires, count)
        assert_same_values(on_gpu, on_cpu)
    for keeps in (False, True):
        on_cpu, on_gpu = averages(coding, wires, count, keeps)
        if draw is summable_values:
            assert torch.equal(on_gpu[0].cpu(), on_cpu[0])
        assert_same_wires(coding, codec, on_gpu[0], on_cpu[0], count)
        assert_same_values(on_gpu[1], on_cpu[1])
        assert_same_values(on_gpu[2], on_cpu[2])


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", COUNTS)
def test_floats_are_scaled_alike(dtype, count):
    for begin in (0, 1):  # where whole vectors can be loaded, and where they cannot
        for factor in (4 / 3, -1.7, 0.3):
            values = hard_values(begin + count, 0).to(dtype)[begin:]
            on_gpu = values.cuda() if begin == 0 else torch.cat([values[:1], values]).cuda()[1:]
            core.scale(values, factor)
            core.scale(on_gpu, factor)
            on_gpu, numbers = on_gpu.cpu(), ~values.isnan()
            assert torch.equal(~on_gpu.isnan(), numbers)
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
            assert torch.equal(on_gpu[numbers].view(bits), values[numbers].view(bits))


def test_misplaced_values():
    coding = core.Coding("minmax_u8")
    with pytest.raises(ValueError, match="one device"):
        coding.encode(torch.ones(8).cuda(), torch.zeros(64, dtype=torch.uint8))
    values = torch.ones(1025).cuda()[1:]  # whole vectors cannot be loaded from there
    wire = torch.zeros(coding.wire_nbytes(1024), dtype=torch.uint8)
    gpu_wire = wire.cuda()
    coding.encode(values.cpu(), wire)
    coding.encode(values, gpu_wire)
    assert torch.equal(gpu_wire.cpu(), wire)
    with pytest.raises(ValueError, match="multiple of 4"):
        coding.encode(values, torch.zeros(len(wire) + 1, dtype=torch.uint8).cuda()[1:])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("count", COUNTS)
def test_halves_begin_anywhere(dtype, count):
    coding = core.Coding(dtype)
    values = hard_values(count, 0)
    wire = torch.zeros(2 * count, dtype=torch.uint8)
    coding.encode(values, wire)
    for begin in (2, 8):  # where rows cannot be loaded at once, and where they can
        gpu_wire = torch.zeros(2 * count + begin, dtype=torch.uint8).cuda()[begin:]
        coding.encode(values.cuda(), gpu_wire)
        assert_same_wires(coding, (dtype,), gpu_wire, wire, count)
        said = torch.empty(count)
        gpu_said = said.cuda()
        coding.decode(wire, said)
        coding.decode(gpu_wire, gpu_said)
        assert_same_values(gpu_said, said)
