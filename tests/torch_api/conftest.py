"""What every rank has: tests draw all ranks' tensors on every rank, and so know the results."""

from __future__ import annotations

import pytest
import torch


class Everyone:
    """All ranks of the world, seen from one of them."""

    def __init__(self, bagua) -> None:
        self.me: int = bagua.get_rank()
        self.size: int = bagua.get_world_size()
        self.ranks = range(self.size)

    def draw(self, shape, dtype=torch.float32, seed=0) -> list[torch.Tensor]:
        """One tensor per rank, of small whole numbers: sums of these are exact."""
        low = 0 if dtype in (torch.uint8, torch.bool) else -4
        high = 2 if dtype == torch.bool else 5
        generator = torch.Generator().manual_seed(seed)
        whole = torch.int64
        drawn = torch.randint(low, high, (self.size, *shape), generator=generator, dtype=whole)
        return list(drawn.to(dtype))


@pytest.fixture(scope="session")
def bagua():
    import bagua.torch_api

    bagua.torch_api.init_process_group()
    return bagua.torch_api


@pytest.fixture(scope="session")
def everyone(bagua) -> Everyone:
    return Everyone(bagua)
