"""torch.distributed beside the engine, where its gloo has to take the network between hosts."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.ranks((2, 1))


def test_ranks_meet_between_hosts():
    import bagua.torch_api as bagua

    bagua.init_process_group()
    try:
        ones = torch.ones(3)
        torch.distributed.all_reduce(ones)
        assert ones.tolist() == [bagua.get_world_size()] * 3
    finally:
        torch.distributed.destroy_process_group()
