"""A rank that is killed while children it has forked live on, as the workers of a DataLoader do.

They have inherited its connections, which must not keep it alive for the others. A ping would be
missed only after 60 seconds here, which is more than the whole test may take.
"""

import re

import pytest

pytestmark = pytest.mark.slow

FORKS = {
    "by Python": "os.fork()",
    "by a library": "ctypes.PyDLL(None).fork()",  # which tells Python nothing
}

PROGRAM = """
import ctypes, glob, os, signal, sys, time
import numpy as np
import bagua

bagua.init(transport=sys.argv[1], peer_timeout_s=60)
me, here = bagua.rank(), os.path.dirname(os.path.abspath(__file__))
print("pid", os.getpid(), flush=True)
bagua.allreduce(np.ones(4), name="x")

def die_before_a_child():
    if {fork} == 0:
        time.sleep(1000)
        os._exit(0)
    time.sleep(0.5)  # the others wait by now
    os.kill(os.getpid(), signal.SIGKILL)

if me == {victim}:
    die_before_a_child()
try:
    bagua.allreduce(np.ones(4), name="x")
except bagua.PeerError as error:
    print("PeerError", error, flush=True)
# The first one to fail ends the job.
open(f"{{here}}/failed.{{me}}", "w").close()
while len(glob.glob(f"{{here}}/failed.*")) < 2:
    time.sleep(0.01)
os._exit(0)
"""


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("transport", ["shm", "mpi"])
@pytest.mark.parametrize("victim", [0, 1])
def test_children_do_not_hide_the_death_of_their_rank(run_ranks, victim, transport, fork):
    result = run_ranks(
        3,
        PROGRAM.format(victim=victim, fork=FORKS[fork]),
        transport,
        timeout_s=30,
        fault_tolerant=True,
    )
    assert not result.timed_out, result
    pid = re.search(r"pid (\d+)", result.stdout[victim])[1]
    for rank in {0, 1, 2} - {victim}:
        assert re.search(rf"^PeerError rank {victim} \(.*pid {pid}\)", result.stdout[rank], re.M), (
            result
        )
