"""torch.distributed as `init_process_group` starts it beside the engine."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

HEADER = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import bagua.torch_api as bagua

rank, size = bagua.get_rank(), bagua.get_world_size()
assert not dist.is_initialized()
bagua.init_process_group()

def total():
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()
"""


@pytest.fixture
def run(run_ranks):
    def run(n, body, *, header=HEADER, **kwargs):
        result = run_ranks(n, header + body, timeout_s=40, **kwargs)
        assert not result.timed_out, f"a rank hangs\n{result}"
        return result

    return run


@pytest.mark.parametrize("n", [1, 3])
def test_scripts_find_it_started(run, n):
    result = run(
        n,
        """
assert "GLOO_SOCKET_IFNAME" not in os.environ  # processes started from here may be on many machines
dist.barrier()
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
assert total() == size
ends = dist.new_group(sorted({0, size - 1}))
pair = bagua.from_torch_group(ends)
result = torch.zeros(1)
bagua.allreduce(torch.ones(1), result, comm=pair)
assert result.item() == (len({0, size - 1}) if rank in (0, size - 1) else 0)

bagua.init_process_group()  # does nothing
bagua.destroy_process_group()
assert not dist.is_initialized()
bagua.init_process_group()
assert total() == size
print("all well")
""",
    )
    assert result.exit_code == 0, result
    assert [out.strip() for out in result.stdout] == ["all well"] * n, result


def test_a_script_may_have_started_it(run):
    result = run(
        2,
        """
bagua.init_process_group()
bagua.destroy_process_group()
assert total() == size
print("all well")
""",
        header="""
import os
import torch
import torch.distributed as dist
import bagua.torch_api as bagua

rank, size = bagua.get_rank(), bagua.get_world_size()
store = dist.FileStore(os.path.dirname(os.path.abspath(__file__)) + "/store", size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

def total():
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()
""",
    )
    assert result.exit_code == 0, result
    assert [out.strip() for out in result.stdout] == ["all well"] * 2, result


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_end_of_a_rank_hangs_nobody(run, culprit):
    result = run(
        3,
        f"""
total()
bagua.barrier()
if rank == {culprit}:
    os.kill(os.getpid(), signal.SIGKILL)
bagua.barrier()
""",
        fault_tolerant=True,
    )
    assert result.exit_code != 0, result
    for other in {0, 1, 2} - {culprit}:
        assert f"PeerError: rank {culprit} (host" in result.stderr[other], result
        assert "[rank" not in result.stderr[other], result
        assert "terminate called" not in result.stderr[other], result


def test_who_waits_in_it_hears_of_a_death(run):
    result = run(
        2,
        """
total()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.barrier()
except RuntimeError:
    print("heard of it", flush=True)
""",
        fault_tolerant=True,
    )
    assert "heard of it" in result.stdout[0], result


def test_survivors_start_it_anew(run):
    result = run(
        3,
        """
total()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    bagua.barrier()
except RuntimeError:
    bagua.destroy_process_group()
bagua.init_process_group(comm=[0, 2])
print("total", total(), flush=True)
os._exit(0)
""",
        fault_tolerant=True,
    )
    for other in (0, 2):
        assert "total 2.0" in result.stdout[other], result


def test_forked_children_end(run):
    result = run(
        2,
        """
total()
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("all well", total())
""",
    )
    assert result.exit_code == 0, result
    assert [out.strip() for out in result.stdout] == ["all well 2.0"] * 2, result
