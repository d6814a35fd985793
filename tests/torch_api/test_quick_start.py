"""What people start with, and by the command that they know."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

QUICK_START = """
import torch
torch.manual_seed(0)
ds = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

import bagua.torch_api as bagua
device = bagua.get_local_rank()  # before init_process_group, for torch.cuda.set_device
bagua.init_process_group()
bagua.init_process_group()
sampler = torch.utils.data.distributed.DistributedSampler(
    ds, num_replicas=bagua.get_world_size(), rank=bagua.get_rank())
from bagua.torch_api.algorithms import gradient_allreduce
algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
model = model.with_bagua([optimizer], algorithm)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in torch.utils.data.DataLoader(ds, batch_size=5, sampler=sampler):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

assert bagua.is_initialized()
assert bagua.get_local_size() == bagua.get_world_size()
print(device, bagua.get_rank(), bagua.get_world_size(), model.weight.tolist(), flush=True)
bagua.barrier()
bagua.destroy_process_group()
assert not bagua.is_initialized()
"""


@pytest.mark.slow
def test_quick_start_by_the_command_of_bagua(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(QUICK_START)
    launch = [sys.executable, "-m", "bagua.distributed.launch", "--nnodes=1", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, script, "--epochs"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split(maxsplit=4) for line in done.stdout.splitlines())
    assert [line[:4] for line in lines] == [["[0]", "0", "0", "2"], ["[1]", "1", "1", "2"]]
    assert lines[0][4] == lines[1][4]


ALONE = """
import bagua.torch_api as bagua
assert not bagua.is_initialized()
for call in (bagua.barrier, bagua.new_group, lambda: bagua.broadcast_object(1)):
    try:
        call()
    except ValueError as error:
        assert "init" in str(error), error
    else:
        raise AssertionError(call)
assert (bagua.get_rank(), bagua.get_world_size()) == (0, 1)
assert bagua.is_initialized()
print("all well")
"""


def test_without_a_launcher():
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, env=os.environ, timeout=120
    )
    assert done.stdout.strip() == "all well", done.stderr


NAMES = """
init_process_group get_rank get_world_size get_local_rank get_local_size new_group from_torch_group
barrier destroy_process_group is_initialized
send recv broadcast broadcast_object broadcast_coalesced reduce reduce_inplace allreduce
allreduce_inplace allreduce_coalesced_inplace allgather allgather_inplace gather gather_inplace
scatter scatter_inplace reduce_scatter reduce_scatter_inplace alltoall alltoall_inplace alltoall_v
alltoall_v_inplace ReduceOp
algorithms communication contrib data_parallel
"""


@pytest.mark.ranks(1)
def test_names(bagua):
    assert [name for name in NAMES.split() if not hasattr(bagua, name)] == []
    assert [name for name in bagua.__all__ if not hasattr(bagua, name)] == []
    missing = [n for n in bagua.communication.__all__ if not hasattr(bagua.communication, n)]
    assert missing == []


# What importing the API changes in torch's own classes.
CHANGED = """
import sys

import torch
import torch.amp


def attributes():
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "torch"]
    classes = {
        c
        for module in modules
        for c in list(vars(module).values())
        if isinstance(c, type) and c.__module__.split(".")[0] == "torch"
    }
    return {(c, name): value for c in classes for name, value in list(vars(c).items())}

before = attributes()
known = {c for c, _ in before}
import bagua.torch_api

print(*(
    f"{c.__qualname__}.{name}"
    for (c, name), value in attributes().items()
    if c in known and before.get((c, name)) is not value
))
"""


@pytest.mark.ranks(1)
def test_torchs_classes_get_one_name(bagua):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHANGED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["Module.with_bagua"]
