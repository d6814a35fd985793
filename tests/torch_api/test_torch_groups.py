"""Groups of torch.distributed, which is started beside the engine."""

from __future__ import annotations

import pytest

TORCH_GROUPS = """
import os, sys
import torch
import torch.distributed as dist
import bagua.torch_api as bagua

rank, size = bagua.get_rank(), bagua.get_world_size()
store = dist.FileStore(os.path.dirname(os.path.abspath(__file__)) + "/store", size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

whole = bagua.from_torch_group(dist.group.WORLD)
assert whole.ranks == list(range(size))

pair = bagua.from_torch_group(dist.new_group([0, 2]))
result = torch.zeros(1)
bagua.allreduce(torch.ones(1), result, comm=pair)
assert result.item() == (2 if rank in (0, 2) else 0)

halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
half = bagua.from_torch_group(halves[rank // 2])
bagua.allreduce(torch.tensor([float(rank)]), result, comm=half)
assert result.item() == (1 if rank < 2 else 5)

from bagua.torch_api.data_parallel import DistributedDataParallel
model = torch.nn.Linear(2, 1)
ddp = DistributedDataParallel(model, process_group=halves[rank // 2])
ddp(torch.full((1, 2), float(rank))).sum().backward()
assert model.weight.grad.tolist() == [[0.5 if rank < 2 else 2.5] * 2]
print("all well")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_groups_of_torch(run_ranks):
    result = run_ranks(4, TORCH_GROUPS)
    assert result.exit_code == 0, str(result)
    assert [out.strip() for out in result.stdout] == ["all well"] * 4
