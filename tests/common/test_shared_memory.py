"""Whether ranks of a machine share memory: by the setting `transport`, and where they cannot."""

import os
import re
import subprocess
import sys

import pytest

# A rank whose files may not be as large as what it would show to the others: `ulimit -f`. MPI has
# made its own by then.
PROGRAM = """
import resource, sys
import numpy as np
from mpi4py import MPI
import bagua

transport, small = sys.argv[1], sys.argv[2] == "small files"
if small and MPI.COMM_WORLD.rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
try:
    bagua.init(transport=transport)
except bagua.BaguaError as error:
    print(type(error).__name__, error, flush=True)
else:
    print("sum", bagua.allreduce(np.ones(1000, np.float32), op=bagua.Sum)[0])
    print("sends", bagua.counters()["sent_nbytes"] > 0, flush=True)
"""
WARNING = "warning: no shared memory between ranks of one machine: "
REASON = r"rank 1: cannot make \d+ bytes of shared memory: File too large \(see ulimit -f, 8192\)"


# Nobody would remove it.
def test_a_process_alone_makes_mpi_no_file_in_dev_shm():
    program = (
        "import os, bagua; bagua.init(); maps = open('/proc/self/maps').read();"
        "print(bagua.size(), '/dev/shm/' in maps, os.environ.get('OMPI_MCA_btl'))"
    )
    job = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "BAGUA_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(job)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "1 False None\n", run


@pytest.fixture
def run(run_ranks):
    def run(transport, files=""):
        result = run_ranks(2, PROGRAM, transport, files)
        assert result.exit_code == 0, result
        return result

    return run


@pytest.mark.parametrize(("transport", "sends"), [("auto", False), ("shm", False), ("mpi", True)])
def test_transport_says_whether_memory_is_shared(run, transport, sends):
    result = run(transport)
    for rank in range(2):
        assert result.stdout[rank] == f"sum 2.0\nsends {sends}\n", result
        assert "shared memory" not in result.stderr[rank], result


def test_without_shared_memory_messages_do_it_all_and_every_rank_is_told(run):
    result = run("auto", "small files")
    for rank in range(2):
        assert result.stdout[rank] == "sum 2.0\nsends True\n", result
        assert re.search(f"bagua.{rank}. {WARNING}{REASON}", result.stderr[rank]), result


def test_shared_memory_that_is_asked_for_and_impossible_is_an_error_on_every_rank(run):
    result = run("shm", "small files")
    for rank in range(2):
        said = f"UsageError transport='shm' cannot be used: {REASON}"
        assert re.match(said, result.stdout[rank]), result
        assert "sum" not in result.stdout[rank], result


def test_small_files_are_no_matter_where_nothing_is_shared(run):
    result = run("mpi", "small files")
    for rank in range(2):
        assert result.stdout[rank] == "sum 2.0\nsends True\n", result
        assert WARNING not in result.stderr[rank], result


LATE_LIMIT = """
import pathlib, resource, time
import bagua

bagua.init()
shared = bagua.empty_shared(8 << 20)
bagua.barrier()
if bagua.rank() == 0:
    now = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (now + (8 << 20), -1))
try:
    bagua.allgather(shared) if OPERATION == "allgather" else bagua.allreduce_(shared)
except bagua.BaguaError as error:
    print(type(error).__name__, error, flush=True)
# mpirun ends all ranks when the first one fails: not before each has said what it has to say.
here = pathlib.Path(__file__).parent
(here / f"said.{bagua.rank()}").touch()
while len(list(here.glob("said.*"))) < bagua.size():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("operation", ["allgather", "allreduce_"])
def test_a_limit_met_in_an_exchange_is_told_with_its_rank(run_ranks, operation):
    result = run_ranks(2, f"OPERATION = {operation!r}\n{LATE_LIMIT}")
    mine, theirs = result.stdout
    assert re.match(r"UsageError cannot .*ulimit -v.*that ended the exchanges", mine), result
    assert re.match(r"PeerError rank 0 .*failed: cannot ", theirs), result
