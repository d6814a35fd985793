"""A rank is killed or halted while all train, by any algorithm: the others name it, and end.

Each test starts a program of its own under mpirun. Times are only guards against hangs.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import faulthandler, glob, os, signal, threading, time
import torch
import bagua.torch
from bagua.algorithms import *

faulthandler.dump_traceback_later(50)
torch.set_num_threads(1)
bagua.torch.init(comm=None, peer_timeout_s=3)
me = bagua.torch.rank()
torch.manual_seed(me)
model = torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))
inner = {optimizer}(model.parameters(), lr=0.001{more})
optimizer = bagua.torch.DistributedOptimizer(
    inner, model.named_parameters(), algorithm={algorithm}
)
try:
    for step in range(1_000_000):
        if me == 1 and step == 30:
            threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIG{signal})).start()
        optimizer.zero_grad()
        model(torch.randn(8, 400)).square().mean().backward()
        optimizer.step()
except bagua.BaguaError as error:
    print(type(error).__name__, error, flush=True)
# mpirun ends the job with the first rank that ends badly.
folder = os.path.dirname(os.path.abspath(__file__))
open(f"{{folder}}/told.{{me}}", "w").close()
while len(glob.glob(f"{{folder}}/told.*")) < 2:
    time.sleep(0.01)
os._exit(0)
"""
EVERY = {
    "bytegrad": "ByteGrad(hierarchical=False)",
    "minmax_u4": "Algorithm(codec='minmax_u4', error_feedback=True)",
    "sign1": "Algorithm(codec='sign1')",
    "topk": "TopK(hierarchical=False)",
    "qadam": "QAdam(warmup_steps=5, hierarchical=False)",
    "low_precision_decentralized": "LowPrecisionDecentralized(hierarchical=False)",
    "diloco": "DiLoCo(every=2, codec='minmax_u8', when='forward')",
    "async": "AsyncModelAverage(sync_interval_ms=0.0)",
}
# Some of all there are, which take minutes.
CASES = [
    *((name, "KILL", "mpi") for name in ("minmax_u4", "sign1", "qadam", "async")),
    *((name, "STOP", "mpi") for name in ("bytegrad", "low_precision_decentralized", "diloco")),
    *((name, "KILL", "auto") for name in ("topk", "diloco", "async")),
]


@pytest.mark.parametrize(("name", "signal", "transport"), CASES)
def test_who_dies_in_training_is_named(run_ranks, name, signal, transport):
    by_momentum = name == "qadam"
    program = PROGRAM.format(
        algorithm=EVERY[name],
        optimizer="bagua.torch.QAdam" if by_momentum else "torch.optim.SGD",
        more=", warmup_steps=5" if by_momentum else "",
        signal=signal,
    )
    result = run_ranks(
        3,
        program,
        timeout_s=60,
        fault_tolerant=signal == "KILL",
        env={"BAGUA_TRANSPORT": transport},
    )
    assert not result.timed_out, f"a rank hangs\n{result}"
    for rank in (0, 2):
        assert "PeerError rank 1 (host" in result.stdout[rank], result
