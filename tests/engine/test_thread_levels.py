"""An MPI that may be called from one thread only, or from one at a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import bagua, numpy
bagua.init()
from mpi4py import MPI
assert MPI.Query_thread() < MPI.THREAD_MULTIPLE and not bagua.mpi_threads_supported()
for count in (1, 1000, 1000000):
    for _ in range(5):
        total = bagua.allreduce(numpy.full(count, bagua.rank() + 1.0), op=bagua.Sum)
        assert (total == sum(range(1, bagua.size() + 1))).all()
handles = [bagua.allreduce_async(numpy.ones(3), name=str(i), op=bagua.Sum) for i in range(50)]
assert all((bagua.synchronize(handle) == bagua.size()).all() for handle in handles)
print("fine")
"""


@pytest.mark.parametrize("transport", ["auto", "mpi"])
@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_every_message_goes_through_one_thread(level, transport):
    done = subprocess.run(
        [sys.executable, "-m", "bagua.launch", "-np", "2", sys.executable, "-c", PROGRAM],
        env={**os.environ, "MPI4PY_RC_THREAD_LEVEL": level, "BAGUA_TRANSPORT": transport},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2
