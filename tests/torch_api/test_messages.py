"""`send` and `recv`: what arrives, and what ends a wait."""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_goes_round(everyone, bagua, dtype):
    """Every rank tells the next one; rank 0 begins."""
    after, before = (everyone.me + 1) % everyone.size, (everyone.me - 1) % everyone.size
    for shape in [(), (0,), (7,), (300, 1000)]:
        right = torch.ones(shape, dtype=dtype)
        tensor = torch.zeros(shape, dtype=dtype)
        if everyone.me == 0:
            bagua.send(right, after)
            bagua.recv(tensor, before)
        else:
            bagua.recv(tensor, before)
            bagua.send(tensor, after)
        assert torch.equal(tensor, right)


@pytest.mark.ranks(2)
def test_messages_keep_their_order_beside_other_operations(everyone, bagua):
    if everyone.me == 0:
        for number in range(5):
            bagua.send(torch.full((3,), float(number)), 1)
    bagua.allreduce_inplace(torch.ones(1000))
    if everyone.me == 1:
        for number in range(5):
            tensor = torch.empty(3)
            bagua.recv(tensor, 0)
            assert tensor.tolist() == [number] * 3


@pytest.mark.ranks(2)
def test_tensors_with_gaps(everyone, bagua):
    right = torch.arange(6.0).view(2, 3)
    if everyone.me == 0:
        bagua.send(right.t().contiguous().t(), 1)
    else:
        tensor = torch.zeros(3, 2).t()
        bagua.recv(tensor, 0)
        assert torch.equal(tensor, right)


@pytest.mark.ranks(2)
def test_a_message_that_does_not_fit(everyone, bagua):
    """It is dropped, and the next one is received."""
    for wrong in (torch.ones(5), torch.ones(4, dtype=torch.float16), torch.ones(1 << 20)):
        if everyone.me == 0:
            bagua.send(wrong, 1)
            bagua.send(torch.ones(4), 1)
        else:
            tensor = torch.zeros(4)
            with pytest.raises(ValueError, match="from rank 0: it sent"):
                bagua.recv(tensor, 0)
            bagua.recv(tensor, 0)
            assert tensor.tolist() == [1] * 4


@pytest.mark.ranks(2)
def test_ranks_that_cannot_be(everyone, bagua):
    with pytest.raises(ValueError, match="with itself"):
        bagua.send(torch.ones(1), everyone.me)
    with pytest.raises(ValueError, match="no rank 2"):
        bagua.recv(torch.ones(1), 2)


STALL = """
import torch
import bagua.torch_api as bagua
bagua.init_process_group(stall_fail_s=1.5, stall_warn_s=0.5)
if bagua.get_rank() == 0:
    try:
        bagua.recv(torch.ones(1), 1)
    except RuntimeError as error:
        print(type(error).__name__, error)
bagua.barrier()
"""


@pytest.mark.slow
def test_a_message_that_does_not_come(run_ranks):
    result = run_ranks(2, STALL)
    assert result.exit_code == 0, str(result)
    assert "PeerError receive from rank 1: not done after 2 s (stall_fail_s)" in result.stdout[0]
    assert "receive from rank 1 has been waiting for" in result.stderr[0]


INTERRUPT = """
import os, signal, threading, time
import torch
import bagua.torch_api as bagua
from bagua.common.world import world
bagua.init_process_group()
tensor = torch.zeros(1000)
if bagua.get_rank() == 0:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        bagua.recv(tensor, 1)
    except KeyboardInterrupt:
        (requests, header), = world().messages._abandoned
        print("kept", header.nbytes)
bagua.barrier()
if bagua.get_rank() == 1:
    bagua.send(torch.ones(1000), 0)
time.sleep(0.2)
bagua.barrier()
"""


@pytest.mark.slow
def test_memory_of_what_was_interrupted_stays(run_ranks):
    result = run_ranks(2, INTERRUPT)
    assert result.exit_code == 0, str(result)
    assert "kept 16" in result.stdout[0], str(result)


DEATH = """
import os, signal, time
import torch
import bagua.torch_api as bagua
bagua.init_process_group()
bagua.barrier()
if bagua.get_rank() == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    if bagua.get_rank() == 0:
        bagua.recv(torch.ones(1), 1)
    else:
        bagua.send(torch.ones(1 << 22), 1)
except RuntimeError as error:
    print(type(error).__name__, error, flush=True)
time.sleep(1)
"""


@pytest.mark.slow
def test_a_rank_that_dies(run_ranks):
    result = run_ranks(3, DEATH, fault_tolerant=True)
    assert not result.timed_out, str(result)
    assert "PeerError receive from rank 1: " in result.stdout[0], str(result)
    assert "PeerError send to rank 1: " in result.stdout[2], str(result)
