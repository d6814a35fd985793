"""What tests over ranks share: they draw all ranks' tensors on every rank, and know the results."""

from __future__ import annotations

import pytest
import torch

FAMILIES = {
    "whole": (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    "floating": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "complex": (torch.complex64, torch.complex128),
}


class Everyone:
    """All ranks of the world, seen from one of them."""

    def __init__(self, hvd) -> None:
        self.hvd = hvd
        self.me: int = hvd.rank()
        self.size: int = hvd.size()
        self.ranks = range(self.size)

    @property
    def shows_memory(self) -> bool:
        """Whether ranks of a machine must see what they exchange with other machines.

        They add it up by themselves then, which rounds 16-bit floats once more, and nobody else
        sees whose it was.
        """
        one_each = self.hvd.local_size() == 1 and self.hvd.is_homogeneous()
        return not one_each and self.hvd.local_size() < self.size

    def draw(self, shape, dtype=torch.float32, seed=0) -> list[torch.Tensor]:
        """One tensor per rank; `shape` may be a function of the rank."""
        shapes = [shape(rank) if callable(shape) else shape for rank in self.ranks]
        return [draw(shape, dtype, 1000 * seed + rank) for rank, shape in enumerate(shapes)]

    def reduced(self, tensors, op, prescale=1.0, postscale=1.0) -> torch.Tensor:
        """The reduction by plain torch, in the widest type of the kind."""
        hvd, dtype = self.hvd, tensors[0].dtype
        stack = torch.stack([wide(tensor) for tensor in tensors])
        if prescale != 1:
            stack = stack * prescale
        if op in (hvd.Sum, hvd.Average):
            result = stack.sum(0)
        elif op == hvd.Product:
            result = stack.prod(0)
        else:
            result = stack.amin(0) if op == hvd.Min else stack.amax(0)
        if op == hvd.Average:
            exact = result.is_floating_point() or result.is_complex()
            result = torch.div(result, len(tensors), rounding_mode=None if exact else "trunc")
        if postscale != 1:
            result = result * postscale
        return result != 0 if dtype == torch.bool else result.to(dtype)

    def share(self, tensor, rank=None) -> torch.Tensor:
        """The rows that a reducescatter leaves to a rank: low ranks take the remainder."""
        return torch.tensor_split(tensor, self.size)[self.me if rank is None else rank]

    def ops_for(self, dtype) -> list:
        hvd = self.hvd
        ops = [hvd.Sum, hvd.Average, hvd.Product, hvd.Min, hvd.Max]
        if dtype == torch.bool:
            ops.remove(hvd.Average)
        return ops[:3] if dtype.is_complex else ops


# Fixtures; a conftest that wants them takes them by name.


@pytest.fixture(scope="session")
def hvd():
    import bagua.torch

    bagua.torch.init()
    return bagua.torch


@pytest.fixture(scope="session")
def everyone(hvd) -> Everyone:
    return Everyone(hvd)


def draw(shape, dtype, seed) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        real = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        values = torch.randn(shape, generator=generator, dtype=real)
        if dtype.is_complex:
            values = torch.complex(values, torch.randn(shape, generator=generator, dtype=real))
        return values.to(dtype)
    low = 0 if dtype == torch.uint8 else -5
    return torch.randint(low, 6, shape, generator=generator, dtype=dtype)


def wide(tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)
