"""A rank of another host that dies: an error that names it on all others, and never a hang."""

from __future__ import annotations

import re

import pytest

from benchmarks.hosts import missing

PROGRAM = """
import faulthandler, glob, os, signal, sys, threading, time
import numpy as np
import bagua

faulthandler.dump_traceback_later(25)
bagua.init(comm=None)
me, last = bagua.rank(), bagua.size() - 1
print("pid", os.getpid(), flush=True)
numbers = np.ones(int(sys.argv[1]), np.float32)
bagua.allreduce(numbers, name="x")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if me == last:
    threading.Timer(0.3, die).start()
    if sys.argv[2] == "idle":
        time.sleep(1000)

def work():
    while True:
        bagua.allreduce(numbers, name="x")

for call in (work, bagua.barrier):
    try:
        call()
    except bagua.BaguaError as error:
        print(type(error).__name__, error, flush=True)

# mpirun ends the job with the first rank that fails: all have said what they have to say.
folder = os.path.dirname(os.path.abspath(__file__))
open(f"{folder}/met.{me}", "w").close()
while len(glob.glob(f"{folder}/met.*")) < last:
    time.sleep(0.01)
os._exit(0)
"""


@pytest.mark.parametrize("layout", [(2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize(
    ("count", "state"), [(4, "idle"), (4 << 20, "busy")], ids=["while waited for", "in 16 MB"]
)
def test_is_named_on_all_others(run_ranks, layout, count, state):
    if reason := missing():
        pytest.skip(reason)
    result = run_ranks(layout, PROGRAM, str(count), state, timeout_s=40, fault_tolerant=True)
    assert not result.timed_out, f"a rank hangs\n{result}"
    *others, dead = result.stdout
    pid = re.search(r"pid (\d+)", dead)[1]
    assert "Error" not in dead, result
    for text in others:
        errors = re.findall(r"^PeerError .*$", text, re.M)
        assert len(errors) == 2, result
        for error in errors:
            # The second host's name ends so.
            assert re.search(rf"rank {len(others)} \(host \w+h1, pid {pid}\)", error), result
