"""A rank that is killed while it trains on a GPU is named by the other, within seconds."""

import pytest

PROGRAM = """
import os, signal, sys, threading
import torch
import bagua.torch as hvd

hvd.init(allow_shared_gpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(2000, 2000).cuda()
sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=sys.argv[1])
try:
    for step in range(1_000_000):
        if step == 20 and hvd.rank() == 1:
            threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        optimizer.zero_grad()
        model(torch.randn(8, 2000, device="cuda")).square().mean().backward()
        optimizer.step()
        float(model.bias.sum())
except hvd.PeerError as error:
    print("heard:", error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_who_is_killed_is_named(run_ranks, algorithm):
    result = run_ranks(2, PROGRAM, algorithm, timeout_s=60, fault_tolerant=True)
    assert not result.timed_out, result
    assert "heard: rank 1 (host" in result.stdout[0], result
