"""Which rank is to blame, among ends that are made up and among those of real ranks."""

import os
import signal
import sys
import time

import pytest
from launch.test_run import code, run, start

from bagua.launch.channel import Exit
from bagua.launch.verdict import culprit

pytestmark = pytest.mark.slow

VICTIM = """
print('PeerError on', rank)
os.write(int(os.environ['BAGUA_RUN_VERDICT_FD'].split(':')[0]), b'peer')
os._exit(1)
"""


@pytest.mark.parametrize(
    ("exits", "blamed"),
    [
        ([], None),
        ([{}], None),
        ([{"code": 1, "peer": True}, {"code": 3}, {"code": 4}], 1),
        ([{"code": 1, "peer": True}, {}, {"code": 2, "peer": True}], 0),
        ([{"code": 1, "peer": True}, {"signal": 15, "stopped": True}], 0),
        ([{"code": 1, "peer": True, "stopped": True}, {"signal": 15, "stopped": True}], 1),
        ([{"signal": 15, "stopped": True}, {"lost": True}], 1),
        ([{"code": 1, "peer": True}, {"signal": 15, "stopped": True, "halted": 19}], 1),
        ([{"code": 1}, {"signal": 15, "stopped": True, "halted": 19}], 0),
    ],
)
def test_culprit(exits, blamed):
    first = culprit([Exit(rank, "here", **how) for rank, how in enumerate(exits)])
    assert (first and first.rank) == blamed


FORGETS = "print('trained')"
KNOWS = "import bagua; bagua.init(); print('trained')"
TOLD = "bagua-run: no rank has told of a bagua.init()"


@pytest.mark.parametrize(
    ("count", "program", "as_script", "told"),
    [
        (2, FORGETS, True, True),
        (2, KNOWS, True, False),
        (2, f"{FORGETS}; raise SystemExit(3)", True, False),
        (1, FORGETS, True, False),
        (2, FORGETS, False, False),
    ],
)
def test_who_forgets_init_hears_so(tmp_path, count, program, as_script, told):
    script = tmp_path / "train.py"
    script.write_text(program)
    how = [script] if as_script else ["-c", program]
    _, out, err = run("-np", count, sys.executable, *how)
    assert "trained" in out
    assert err.count(TOLD) == told, err


def test_nothing_is_written_to_a_pipe_of_the_program():
    """It has closed what it did not open, and opened some of its own."""
    program = """
os.closerange(3, 1000)
pipes = [os.pipe() for _ in range(150)]
import bagua, select
bagua.init()
print("written:", select.select([end for end, _ in pipes], [], [], 0.1)[0])
"""
    result, out, _ = run("-np", 2, *code(program))
    assert result == 0
    assert out.count("written: []") == 2, out


def test_the_culprit_may_end_last():
    program = f"""
from mpi4py import MPI
if rank == 1:
    print('mine'); time.sleep(1.5); os._exit(5)
{VICTIM}"""
    result, out, err = run("-np", 3, *code(program))
    assert result == 5
    assert "PeerError on 0" in out
    assert "PeerError on 2" in out
    *_, tail, last = err.splitlines()
    assert tail == "[1] mine"
    assert last.startswith("bagua-run: rank 1 on host")
    assert last.endswith("exited with code 5")


def test_a_victim_is_named_when_nobody_else_fails():
    """The other rank hangs: it is stopped after the grace, and that is no reason of its own."""
    result, _, err = run("-np", 2, *code(f"if rank == 1: time.sleep(100)\n{VICTIM}"))
    assert result == 1
    last = err.splitlines()[-1]
    assert "rank 0 on host" in last
    assert last.endswith("because of another rank, and no rank failed for reasons of its own")


def test_a_rank_that_left_early_is_told():
    result, _, err = run("-np", 2, *code(f"if rank == 1: os._exit(0)\n{VICTIM}"))
    assert result == 1
    assert err.splitlines()[-1].endswith("; rank 1 had exited with code 0")


def test_a_job_of_victims_can_be_interrupted():
    with start("-np", 2, *code(f"if rank == 1: time.sleep(100)\n{VICTIM}")) as job:
        assert job.stdout.readline() == "[0] PeerError on 0\n"
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 128 + signal.SIGINT


def test_bagua_itself_tells_victims_from_the_culprit():
    program = """
import bagua, numpy
bagua.init()
if rank == 1: raise ValueError('mine')
while True: bagua.allreduce(numpy.ones(3), name='x')
"""
    for _ in range(3):
        result, _, err = run("-np", 3, *code(program))
        assert result == 1
        assert err.splitlines()[-2] == "[1] ValueError: mine"
        assert "rank 1 on host" in err.splitlines()[-1]


@pytest.mark.parametrize("flags", [[], ["--fault-tolerant"]])
def test_a_rank_that_stands_still_is_ended_and_blamed(flags):
    program = f"""
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)
time.sleep(0.5)
{VICTIM}"""
    result, _, err = run("-np", 3, *flags, *code(program))
    assert result != 0
    first, last = err.splitlines()[0], err.splitlines()[-1]
    assert "rank 1 on host" in first
    assert "was halted by signal 19 (SIGSTOP)" in first
    assert "kill -CONT" in first
    assert "rank 1 on host" in last
    assert last.endswith("did not go on until it was ended")  # nor was it the kernel, for memory


def test_survivors_of_a_rank_that_stands_still_end_well():
    program = "\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)"
    result, _, err = run("-np", 2, "--fault-tolerant", *code(program))
    assert result == 0
    assert err.splitlines()[-1] == "bagua-run: the surviving ranks went on and ended well"


def test_ranks_that_stand_still_are_survivors_who_may_go_on():
    """Though one has failed: none of those who have heard of it has ended."""
    program = """
if rank == 2: os._exit(3)
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
if rank == 0:
    print(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
print("done", rank)
"""
    with start("-np", 3, "--fault-tolerant", *code(program)) as job:
        said = [job.stderr.readline() for _ in range(2)]
        time.sleep(6)  # longer than halted ranks get when all others have ended
        for line in said:
            os.kill(int(line.split("kill -CONT ")[1].split("`")[0]), signal.SIGCONT)
        out, err = job.communicate(timeout=60)
    assert job.returncode == 0
    assert "done 0" in out
    assert "done 1" in out
    assert err.splitlines()[-1] == "bagua-run: the surviving ranks went on and ended well"


def test_a_rank_may_stand_still_for_a_while():
    program = """
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
print("done")
"""
    with start("-np", 2, "--fault-tolerant", *code(program)) as job:
        said = job.stderr.readline()
        os.kill(int(said.split("kill -CONT ")[1].split("`")[0]), signal.SIGCONT)
        out, err = job.communicate(timeout=60)
    assert job.returncode == 0
    assert sorted(out.splitlines()) == ["[0] done", "[1] done"]
    assert err.splitlines()[0].endswith("goes on")
