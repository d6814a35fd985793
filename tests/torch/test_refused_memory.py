"""A rank whose system refuses memory where all lay out something anew: the others hear so.

Whoever asks for it, and at whichever part of the layout.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import resource, sys, torch, bagua.torch as bagua

bagua.init()
model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1000))
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = bagua.DistributedOptimizer(sgd, model.named_parameters())
bagua.broadcast_parameters(model.state_dict(), root_rank=0)

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()

held = []

def refuse_memory():
    if bagua.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

def hold_what_is_left():
    try:
        while bagua.rank() == 1:
            held.append(bagua.empty_shared(1 << 18))
    except bagua.UsageError:
        pass

def tell(work):
    try:
        work()
    except bagua.BaguaError as error:
        print(type(error).__name__, error)

if sys.argv[1] == "buckets":  # which the first step has shown to be better in another order
    refuse_memory()
    tell(step)
    tell(step)
else:
    step()
    refuse_memory()
    hold_what_is_left()
    tell(lambda: optimizer.set_algorithm("local_sgd"))
    tell(step)
bagua.barrier()  # all else goes on
"""


@pytest.mark.parametrize("what", ["buckets", "weights"])
def test_all_hear_so(run_ranks, what):
    result = run_ranks(2, PROGRAM, what)
    assert result.exit_code == 0, str(result)
    first, second = result.stdout
    assert second.startswith("UsageError cannot make"), str(result)
    assert first.startswith("PeerError optimizer.0."), str(result)
    assert f"rank 1 could not make its {what} (UsageError: cannot make" in first, str(result)


PRIVATE = """
import resource, sys, torch, bagua.torch as bagua
from bagua.algorithms import ByteGrad, LocalSGD, PowerSGD

bagua.init(transport="mpi")  # where arenas are memory like any other
algorithm, arenas = {
    "residuals": (ByteGrad(error_feedback=True), 1.5),
    "matrices": (PowerSGD(warmup_steps=0), 1.5),
    "rounds": (LocalSGD(), 0.4),
}[sys.argv[1]]
model = torch.nn.Linear(3000, 3000, bias=False)
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = bagua.DistributedOptimizer(sgd, model.named_parameters())
bagua.broadcast_parameters(model.state_dict(), root_rank=0)

def tell(work):
    try:
        work()
        return True
    except Exception as error:
        print(type(error).__name__, error)

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 3000)).sum().backward()
    optimizer.step()

step()
step()
if bagua.rank() == 1:
    mine = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    most = mine + int(arenas * 4 * 3000 * 3000)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
failed = not tell(lambda: optimizer.set_algorithm(algorithm))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert failed == (bagua.rank() == 1), "the others have theirs"
assert not tell(step)
assert not tell(step), "nor in any later one"
bagua.barrier()
"""


@pytest.mark.parametrize("what", ["residuals", "matrices", "rounds"])
def test_of_memory_that_nobody_shares(run_ranks, what):
    result = run_ranks(2, PRIVATE, what)
    assert result.exit_code == 0, str(result)
    first, second = result.stdout
    error = "MemoryError" if what == "residuals" else "RuntimeError"
    assert second.startswith(error), str(result)
    layout = "weights" if what == "rounds" else "buckets"
    assert f"rank 1 could not make its {layout} ({error}" in first, str(result)
    assert first.startswith("PeerError optimizer.0."), str(result)
    assert "UsageError optimizer.0: this rank gave up" in first, str(result)
