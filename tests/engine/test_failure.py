"""Ranks that die, stop, leave early or were set up differently: a clear error, and never a hang.

Each test starts a program of its own under mpirun. Times are only guards against hangs.
"""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.slow

HEADER = """
import faulthandler, glob, itertools, os, signal, subprocess, sys, threading, time
import numpy as np
import bagua

faulthandler.dump_traceback_later(50)

def say(*words):
    print(*words, flush=True)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def one():
    return np.ones(4, np.float32)

meetings = itertools.count()

def meet(count=None):
    '''Waits until all ranks, or so many, are here.

    So a death later on disturbs nothing before; and mpirun, which ends the job with the first rank
    that fails, ends none that has still something to say.
    '''
    folder, number = os.path.dirname(os.path.abspath(__file__)), next(meetings)
    open(f"{folder}/meeting.{number}.{me}", "w").close()
    while len(glob.glob(f"{folder}/meeting.{number}.*")) < (count or size):
        time.sleep(0.01)

def expect_error(work):
    try:
        work()
    except bagua.BaguaError as error:
        say(type(error).__name__, error)
    else:
        say("no error")
"""
START = """
bagua.init(comm=None)
me, size = bagua.rank(), bagua.size()
say("pid", os.getpid())
meet()
"""


def pid_of(result, rank: int) -> str:
    return re.search(r"pid (\d+)", result.stdout[rank])[1]


@pytest.fixture
def run(run_ranks):
    def run(n, body, *, start=START, **kwargs):
        kwargs.setdefault("timeout_s", 60)
        result = run_ranks(n, HEADER + start + body, **kwargs)
        assert not result.timed_out, f"a rank hangs\n{result}"
        return result

    return run


# ---- death -------------------------------------------------------------------------------------

DEATHS = {
    "before anything": """
if me == 1:
    die()
time.sleep(0.3)
work = lambda: bagua.allreduce(one(), name="x")
""",
    "while the others wait": """
bagua.allreduce(one(), name="x")
meet()
if me == 1:
    time.sleep(0.5)
    die()
work = lambda: bagua.allreduce(one(), name="x")
""",
    "in the middle of 64 MB": """
big = np.ones(16 << 20, np.float32)
bagua.allreduce_(big, name="big")
if me == 1:
    threading.Timer(0.3, die).start()
def work():
    while True:
        bagua.allreduce_(big, name="big")
""",
    "stopped for a while, so that the others sleep": """
big = np.ones(16 << 20, np.float32)
bagua.allreduce_(big, name="big")
if me == 1:
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {pid}; sleep 1; kill -KILL {pid}"])
def work():
    while True:
        bagua.allreduce_(big, name="big")
""",
    "while all are idle": """
bagua.allreduce(one(), name="x")
meet()
if me == 1:
    die()
time.sleep(2)
work = lambda: bagua.allreduce(one(), name="x")
""",
}


@pytest.mark.parametrize("when", DEATHS)
def test_killed_rank_is_named_on_every_other(run, when):
    """At once: it is no ping that tells, as nobody is pinged."""
    result = run(
        3,
        DEATHS[when]
        + """
expect_error(work)
expect_error(lambda: bagua.allreduce(one(), name="later"))
expect_error(bagua.barrier)
say("survived")
meet(2)
""",
        start=START.replace("comm=None", "comm=None, peer_timeout_s=0"),
        fault_tolerant=True,
    )
    for rank in (0, 2):
        errors = re.findall(r"^PeerError .*$", result.stdout[rank], re.M)
        assert len(errors) == 3, result
        for error in errors:
            assert "rank 1 (host" in error, result
            assert f"pid {pid_of(result, 1)}" in error, result
        assert "survived" in result.stdout[rank], result
    assert "survived" not in result.stdout[1]


def test_death_of_rank_zero(run):
    result = run(
        3,
        """
if me == 0:
    die()
expect_error(lambda: bagua.allreduce(one()))
meet(2)
""",
        fault_tolerant=True,
    )
    for rank in (1, 2):
        assert "PeerError rank 0 (host" in result.stdout[rank], result


def test_every_open_handle_gets_the_error(run):
    result = run(
        2,
        """
if me == 1:
    time.sleep(0.3)
    die()
handles = [bagua.allreduce_async(one(), name=f"t{i}") for i in range(20)]
handles.append(bagua.allgather_async(one()))
for handle in handles:
    expect_error(lambda: bagua.synchronize(handle))
""",
        fault_tolerant=True,
    )
    assert result.stdout[0].count("PeerError rank 1 (host") == 21, result


def test_without_fault_tolerance_the_job_ends_too(run):
    result = run(2, "\nif me == 1:\n    die()\nbagua.allreduce(one())\n")
    assert result.exit_code != 0


# ---- silence -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("busy", [False, True])
def test_stopped_rank_is_named_on_every_other(run, stopped, busy):
    work = "while True: bagua.allreduce_(big, name='big')" if busy else "bagua.allreduce(one())"
    result = run(
        3,
        f"""
big = np.ones(4 << 20, np.float32)
bagua.allreduce_(big, name="big")
if me == {stopped}:
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
    {"pass" if busy else "time.sleep(1000)"}
def work():
    {work}
expect_error(work)
meet(2)
os._exit(0)
""",
        timeout_s=40,
    )
    for rank in {0, 1, 2} - {stopped}:
        assert f"PeerError rank {stopped} (host" in result.stdout[rank], result
        assert "has not answered" in result.stdout[rank], result


def test_stopped_rank_is_named_though_the_others_exchange_without_it(run):
    result = run(
        3,
        """
some = bagua.add_process_set([0, 1])
bagua.barrier()
if me == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
handle = bagua.allreduce_async(one(), name="all")
def work():
    while not handle.poll():
        bagua.allreduce(one(), name="some", process_set=some)
        time.sleep(0.3)
    handle.wait()
expect_error(work)
meet(2)
os._exit(0)
""",
        timeout_s=40,
    )
    for rank in (0, 1):
        assert "PeerError rank 2 (host" in result.stdout[rank], result
        assert "has not answered" in result.stdout[rank], result


@pytest.mark.parametrize("delay_s", [0.13, 0.22])  # mostly in the middle of writing
def test_who_comes_back_writes_to_nobody(run, delay_s):
    result = run(
        2,
        f"""
big = bagua.empty_shared(64 << 20)
big.fill(1)
bagua.allreduce_(big, name="warm")
pids = bagua.allgather_object(os.getpid())
bagua.barrier()
if me == 0:
    threading.Timer({delay_s}, lambda: os.kill(pids[1], signal.SIGSTOP)).start()
    def work():
        while True: bagua.allreduce_(big, name="big", op=bagua.Max)
    expect_error(work)
    big.fill(-7)
    os.kill(pids[1], signal.SIGCONT)
    meet()
    say((big == -7).all())
    meet()
else:
    try:
        while True: bagua.allreduce_(big, name="big", op=bagua.Max)
    except bagua.PeerError:
        meet()
    meet()
os._exit(0)
""",
        timeout_s=60,
    )
    assert "PeerError rank 1 (host" in result.stdout[0], result
    assert "True" in result.stdout[0], result


def test_slow_rank_is_no_stopped_one(run):
    result = run(
        2,
        """
bagua.allreduce(one())
if me == 1:
    end = time.time() + 4
    while time.time() < end:  # computes, and holds the interpreter for most of the time
        sum(range(1000000))
say(bagua.allreduce(one(), op=bagua.Sum)[0])
""",
        env={"BAGUA_PEER_TIMEOUT_S": "1"},
    )
    for rank in (0, 1):
        assert "2.0" in result.stdout[rank], result


def test_call_that_one_rank_skips_fails_after_the_time_that_was_set(run):
    result = run(
        2,
        """
if me == 0:
    expect_error(lambda: bagua.allreduce(one(), name="skipped"))
else:
    time.sleep(1.5)  # or the next call would be the one that waits for too long
say(bagua.allreduce(one(), name="next", op=bagua.Sum)[0])
""",
        env={"BAGUA_STALL_FAIL_S": "1"},
    )
    assert re.search(r"PeerError skipped: rank 1 not ready after 1 s", result.stdout[0]), result
    for rank in (0, 1):
        assert "2.0" in result.stdout[rank], result
    assert result.exit_code == 0, result


# 9 s are for ranks that may yet come.
@pytest.mark.parametrize(("warn_s", "peer_timeout_s"), [(1, 5), (9, 5), (9, 0)])
def test_ranks_that_make_different_calls_hear_of_both(run, warn_s, peer_timeout_s):
    result = run(
        3,
        """
expect_error(lambda: bagua.allreduce(one(), name="odd" if me == 1 else "even"))
""",
        env={
            "BAGUA_STALL_FAIL_S": "4",
            "BAGUA_STALL_WARN_S": str(warn_s),
            "BAGUA_PEER_TIMEOUT_S": str(peer_timeout_s),
        },
    )
    even, odd = "rank 1{}, which has called odd instead", "of which rank 0 has called even instead"
    told = f"even: {even.format(' not ready after 4 s')}; all ranks must make the same calls"
    assert told in result.stdout[0], result
    assert re.search(r"\n  even: waiting \d+ s for " + even.format(""), result.stderr[0]), result
    assert re.search(rf"\n  odd: waiting \d+ s for ranks 0, 2, {odd}", result.stderr[0]), result
    assert result.exit_code == 0, result


@pytest.mark.parametrize(
    "program",
    [
        # Rank 1 may come once rank 2 has.
        """
sets = bagua.add_process_set([0, 1]), bagua.add_process_set([1, 2])
if me == 2:
    time.sleep(4)
for mine in reversed(sets):
    if mine.included():
        bagua.allreduce(one(), name="x", process_set=mine)
""",
        # What each has called and the others have not comes after what they are at.
        """
early = bagua.allreduce_async(one(), name=f"of {me}")
for step in range(8):
    time.sleep(0.5)
    bagua.allreduce(one(), name="step")
late = [bagua.allreduce_async(one(), name=f"of {rank}") for rank in range(3) if rank != me]
for handle in [early, *late]:
    handle.wait()
""",
        # What each has called comes after a step that one of them is late for.
        """
early = bagua.allreduce_async(one(), name=f"of {me}") if me < 2 else None
if me == 2:
    time.sleep(4)
bagua.allreduce(one(), name="step")
late = [bagua.allreduce_async(one(), name=f"of {rank}") for rank in range(2) if rank != me]
for handle in [early, *late]:
    if handle:
        handle.wait()
""",
        # Likewise, and a little after they have got what they waited for.
        """
early = bagua.allreduce_async(one(), name=f"of {me}") if me else None
if me == 0:
    time.sleep(4)
bagua.allreduce(one(), name="step")
time.sleep(0.7 if me else 0)
late = [bagua.allreduce_async(one(), name=f"of {rank}") for rank in (1, 2) if rank != me]
for handle in [early, *late]:
    if handle:
        handle.wait()
""",
        # They compute, and say nothing.
        """
early = bagua.allreduce_async(one(), name=f"of {me}")
time.sleep(4)
late = [bagua.allreduce_async(one(), name=f"of {rank}") for rank in range(3) if rank != me]
for handle in [early, *late]:
    handle.wait()
""",
    ],
    ids=["in a chain", "exchanging", "late", "going on", "computing"],
)
def test_ranks_that_may_yet_come_are_told_of_later(run, program):
    result = run(3, f"{program}\nsay('done')", env={"BAGUA_STALL_WARN_S": "9"})
    assert all("done" in text for text in result.stdout), result
    assert not any("some ranks wait" in text for text in result.stderr), result


def test_warnings_of_some_ranks_leave_room_for_those_of_others(run):
    """However often the first ones call something new."""
    result = run(
        4,
        """
some, rest = bagua.add_process_set([1, 2]), bagua.add_process_set([0, 3])
threading.Timer(10, lambda: os._exit(0)).start()
if me == 1:
    def call_on():
        for i in itertools.count():
            bagua.allreduce_async(one(), name=f"more {i}", process_set=some)
            time.sleep(1.6)
    threading.Thread(target=call_on, daemon=True).start()
if me == 3:
    time.sleep(1000)
bagua.allreduce(one(), name=f"of {me}", process_set=rest if me == 0 else some)
""",
        env={"BAGUA_STALL_WARN_S": "6"},
    )
    told = result.stderr[0]
    assert re.search(
        r"of 1 \(process set 1\): waiting \d+ s for rank 2, which has called of 2 \(proc", told
    ), result
    assert re.search(r"of 0 \(process set 2\): waiting \d+ s for rank 3", told), result
    assert told.count("some ranks wait") <= 4, result  # not one for each call


def test_second_try_after_a_refusal_fails_when_the_others_do_not_come(run):
    result = run(
        2,
        """
if me == 0:
    expect_error(lambda: bagua.allreduce(np.ones(4, ">f4"), name="skipped"))
    expect_error(lambda: bagua.allreduce(one(), name="skipped"))
meet()
say(bagua.allreduce(one(), name="next", op=bagua.Sum)[0])
""",
        env={"BAGUA_STALL_FAIL_S": "1"},
    )
    assert re.search(r"UsageError .*\nPeerError skipped: rank 1 not ready", result.stdout[0]), (
        result
    )
    for rank in (0, 1):
        assert "2.0" in result.stdout[rank], result
    assert result.exit_code == 0, result


def test_call_that_one_rank_skips_is_warned_of(run):
    result = run(
        2,
        """
if me == 1:
    time.sleep(3)
bagua.allreduce(one(), name="late")
""",
        env={"BAGUA_STALL_WARN_S": "1"},
    )
    assert re.search(
        r"bagua\[0\] warning: .*--stall-fail-s.*\n  late: waiting \d+ s for rank 1",
        result.stderr[0],
    )
    assert result.exit_code == 0, result


def test_rank_that_never_comes_to_its_end_is_named(run):
    result = run(
        2,
        """
bagua.barrier()
if me == 1:
    time.sleep(60)
""",
        env={"BAGUA_STALL_WARN_S": "1", "BAGUA_STALL_FAIL_S": "3"},
    )
    waits = r"rank 0 has shut down, and for \d+ s has waited for rank 1"
    assert re.search(rf"bagua\[0\] warning: {waits}", result.stderr[0]), result
    assert re.search(rf"bagua: this job failed: {waits}", result.stderr[0]), result
    assert result.exit_code != 0, result
    assert not result.timed_out, result


# ---- leaving -----------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [0, 2])
def test_rank_that_returns_early_is_named(run, early):
    result = run(
        3,
        f"""
bagua.allreduce(one(), name="x")
if me == {early}:
    sys.exit(0)
expect_error(lambda: bagua.allreduce(one(), name="x"))
expect_error(lambda: bagua.allreduce(one()))
say("goes on")
""",
    )
    for rank in {0, 1, 2} - {early}:
        errors = re.findall(r"^LeftError .*$", result.stdout[rank], re.M)
        assert len(errors) == 2, result
        for error in errors:
            # Those who went on may have come to their end by now, too.
            assert re.search(rf"ranks? [\d, ]*\b{early}\b.* shut down", error), result
        assert "goes on" in result.stdout[rank]
    assert result.exit_code == 0, result


def test_exception_on_one_rank_ends_the_others(run):
    result = run(
        2,
        """
if me == 1:
    raise RuntimeError("bad batch")
bagua.allreduce(one())
""",
        fault_tolerant=True,
    )
    assert "RuntimeError: bad batch" in result.stderr[1]
    assert "LeftError" in result.stderr[0], result
    assert "rank 1" in result.stderr[0]
    assert result.exit_code != 0


def test_ctrl_c_in_the_middle_of_a_step(run):
    result = run(
        2,
        """
big = np.ones(1 << 20, np.float32)
bagua.allreduce_(big, name="big")
if me == 1:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
def work():
    while True:
        bagua.allreduce_(big, name="big")
try:
    work()
except bagua.PeerError as error:
    say("PeerError", error)
    os._exit(0)
""",
        fault_tolerant=True,
    )
    assert "KeyboardInterrupt" in result.stderr[1], result
    assert re.search(r"PeerError .*rank 1", result.stdout[0]), result


def test_ctrl_c_while_waiting_for_a_rank_that_never_comes(run):
    result = run(
        2,
        """
if me == 1:
    time.sleep(2)
    sys.exit(0)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    bagua.allreduce(one())
except KeyboardInterrupt:
    say("interrupted")
""",
    )
    assert "interrupted" in result.stdout[0], result


def test_ctrl_c_while_another_rank_leaves_because_of_it(run):
    """Whoever interrupts a job interrupts all its ranks, and they hear of each other first."""
    result = run(
        2,
        """
go = os.path.dirname(os.path.abspath(__file__)) + "/go"
def interrupt():
    time.sleep(0.6)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # wakes nobody who waits
    open(go, "w").close()
if me == 1:
    while not os.path.exists(go):
        time.sleep(0.001)
    sys.exit(0)
threading.Thread(target=interrupt).start()
try:
    bagua.allreduce(one())
except KeyboardInterrupt:
    say("interrupted")
""",
    )
    assert "interrupted" in result.stdout[0], result


@pytest.mark.parametrize("hook", ["replaced", "interrupted"])
def test_exception_that_our_hook_does_not_hear_of(run, hook):
    """Its rank must not wait in MPI_Finalize for one that does not know."""
    result = run(
        2,
        f"""
def ctrl_c(*_):
    raise KeyboardInterrupt
if me == 1:
    sys.excepthook = ctrl_c if {hook == "interrupted"} else lambda *_: say("hooked")
    raise RuntimeError("bad batch")
time.sleep(1000)
""",
    )
    assert result.exit_code != 0


@pytest.mark.parametrize("partner", ["submits too", "does not"])
def test_shutdown_with_requests_in_flight(run, partner):
    both = partner == "submits too"
    result = run(
        3,
        f"""
bagua.allreduce(one(), name="x")
for round in range(10):
    handle = None
    if {both} or me == 1:
        handle = bagua.allreduce_async(np.ones(100000, np.float32), name="x", op=bagua.Sum)
    bagua.shutdown()
    if handle is not None:
        try:
            assert (bagua.synchronize(handle) == 3).all()
        except bagua.BaguaError as error:
            say(type(error).__name__, error)
    bagua.init()
say("end")
""",
    )
    for rank in range(3):
        assert "end" in result.stdout[rank], result
    if not both:
        assert "in flight" in result.stdout[1]
    assert result.exit_code == 0, result


def test_one_rank_shuts_down_with_a_request_in_flight_that_the_others_wait_for(run):
    result = run(
        3,
        """
bagua.allreduce(one(), name="x")
big = np.ones(1 << 20, np.float32)
if me == 1:
    handle = bagua.allreduce_async_(big, name="big", op=bagua.Sum)
    bagua.shutdown()
else:
    expect_error(lambda: say(bagua.allreduce_(big, name="big", op=bagua.Sum)[0]))
say("end")
""",
    )
    for rank in range(3):
        assert "end" in result.stdout[rank], result
    for rank in (0, 2):
        # The exchange may have been agreed on in time; else the error names who left.
        named = re.search(r"\branks? [\d, ]*\b1\b[\d, ]* ha(s|ve) shut down", result.stdout[rank])
        assert "3.0" in result.stdout[rank] or named, result
    assert result.exit_code == 0, result


# ---- init --------------------------------------------------------------------------------------


def test_init_again_on_the_same_and_on_a_smaller_communicator(run):
    result = run(
        3,
        """
from mpi4py import MPI
def total():
    return int(bagua.allreduce(one(), op=bagua.Sum)[0])
for _ in range(3):
    bagua.init()
    bagua.init()  # a second call does nothing
    say("world", bagua.size(), total())
    bagua.shutdown()
    bagua.shutdown()
some = MPI.COMM_WORLD.Split(me != 1, me)
if me != 1:
    bagua.init(some)
    say("some", bagua.rank(), bagua.size(), total())
    bagua.shutdown()
bagua.init([0, 1]) if me < 2 else None
if me < 2:
    say("pair", bagua.rank(), bagua.size(), total())
    bagua.shutdown()
bagua.init()
say("again", bagua.size(), total())
""",
        start="from mpi4py import MPI\nme = MPI.COMM_WORLD.rank\n",
    )
    for rank in range(3):
        assert result.stdout[rank].count("world 3 3") == 3, result
        assert "again 3 3" in result.stdout[rank], result
    assert "some 0 2 2" in result.stdout[0]
    assert "some 1 2 2" in result.stdout[2]
    for rank in (0, 1):
        assert f"pair {rank} 2 2" in result.stdout[rank], result
    assert result.exit_code == 0, result


SURVIVES = """
if me == 1:
    die()
expect_error(lambda: bagua.allreduce(one()))
bagua.shutdown()
survivors = [0, 2]
bagua.init(survivors)
say("total", int(bagua.allreduce(one(), op=bagua.Sum)[0]), "of", bagua.size())
"""


@pytest.mark.parametrize("end", ["", "bagua.shutdown()"])
def test_survivors_go_on_without_the_dead_rank(run, end):
    result = run(3, SURVIVES + end, fault_tolerant=True)
    for rank in (0, 2):
        assert "PeerError rank 1 (host" in result.stdout[rank], result
        assert "total 2 of 2" in result.stdout[rank], result
        assert "bagua:" not in result.stderr[rank], result  # they have not failed


def test_survivors_may_fail_as_well(run):
    result = run(
        3,
        SURVIVES
        + """
meet(2)
if me == 2:
    die()
expect_error(lambda: bagua.allreduce(one()))
""",
        fault_tolerant=True,
    )
    assert "bagua: this job failed: rank 1 (host" in result.stderr[0], result


def test_rank_that_fails_before_init(run):
    result = run(
        2,
        """
expect_error(bagua.init)
os._exit(0)
""",
        start="""
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    time.sleep(4)
    os._exit(0)
""",
        env={"BAGUA_START_TIMEOUT_S": "1"},
    )
    assert "PeerError not all of 2 ranks called init within 1 s" in result.stdout[0], result
    assert "start_timeout_s" in result.stdout[0]


# Before all are there nothing but MPI waits, which nothing interrupts.
@pytest.mark.parametrize("fault_tolerant", [False, True])
@pytest.mark.parametrize("culprit", ["time.sleep(40)", "os._exit(0)"])
def test_rank_that_does_not_come_to_init(run, culprit, fault_tolerant):
    result = run(
        2,
        "bagua.init()",
        start=f"""
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    {culprit}
""",
        env={"BAGUA_START_TIMEOUT_S": "2"},
        fault_tolerant=fault_tolerant,
    )
    if fault_tolerant or "sleep" in culprit:  # else mpirun is the first to end it
        assert "MPI has not started within 2 s (start_timeout_s)" in result.stderr[0], result


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_rank_that_fails_in_init_alone(run, culprit):
    result = run(
        3,
        """
try:
    bagua.init()
except Exception as error:
    say(type(error).__name__, error)
meet()
bagua.init()
say("sum", bagua.allreduce(one(), op=bagua.Sum)[0])
""",
        start=f"""
from mpi4py import MPI
from bagua.common import meeting
me, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
usable_cores = meeting.usable_cores

def fail_once():
    meeting.usable_cores = usable_cores
    raise OSError("no cores to be seen")

if me == {culprit}:
    meeting.usable_cores = fail_once
""",
    )
    for rank in range(3):
        word = f"PeerError rank {culprit} failed in init: OSError: no cores to be seen"
        assert ("OSError no cores" if rank == culprit else word) in result.stdout[rank], result
        assert "sum 3.0" in result.stdout[rank], result


@pytest.mark.parametrize(
    ("field", "values"),
    [("fusion_mb", ("1", "2")), ("allreduce", ("ring", "auto")), ("bucket_mb", ("5", "25"))],
)
def test_settings_that_differ_are_named_with_both_values(run, field, values):
    result = run(
        3,
        "\nexpect_error(bagua.init)\nsay('end')\n",
        start=f"""
from mpi4py import MPI
values = {values!r}
os.environ["BAGUA_{field.upper()}"] = values[MPI.COMM_WORLD.rank == 1]
""",
    )
    for rank in range(3):
        error = re.search(r"^UsageError .*$", result.stdout[rank], re.M)
        assert error, result
        assert field in error[0]
        for value in values:
            assert value in error[0]
        assert "rank 1" in error[0]
        assert "end" in result.stdout[rank]


def test_settings_may_differ_where_they_are_a_ranks_own(run):
    result = run(
        2,
        "\nbagua.init()\nsay(bagua.allreduce(one(), op=bagua.Sum)[0])\n",
        start="""
from mpi4py import MPI
os.environ["BAGUA_INLINE_DRIVE"] = str(MPI.COMM_WORLD.rank)
os.environ["BAGUA_SPIN_US"] = str(MPI.COMM_WORLD.rank)
""",
    )
    for rank in (0, 1):
        assert "2.0" in result.stdout[rank], result


def test_unknown_variable_is_refused_with_the_nearest_name(run):
    result = run(2, "\nexpect_error(bagua.init)\n", start="", env={"BAGUA_FUSION_MBS": "1"})
    for rank in (0, 1):
        assert "UsageError unknown variable BAGUA_FUSION_MBS" in result.stdout[rank], result
        assert "did you mean 'BAGUA_FUSION_MB'?" in result.stdout[rank]


def test_processes_of_torchrun_are_refused(run):
    """It knows no MPI; who means a world of one says so."""
    program = """
expect_error(bagua.init)
assert not bagua.is_initialized()
from mpi4py import MPI
bagua.init(comm=MPI.COMM_WORLD)
say("size", bagua.size())
"""
    env = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "3"}
    result = run(1, program, start="", env=env)
    assert "UsageError torchrun has started 3 processes" in result.stdout[0], result
    assert "bagua-run -np 3" in result.stdout[0]
    assert "size 1" in result.stdout[0]
    assert result.exit_code == 0, result
    assert "size 2" in run(2, "say('size', size)", env=env).stdout[0], "mpirun's"


def test_nothing_works_before_init_or_after_shutdown(run):
    calls = (
        "bagua.rank, bagua.size, bagua.local_rank, bagua.barrier, bagua.join, "
        "lambda: bagua.allreduce(one()), lambda: bagua.allgather(one()), "
        "lambda: bagua.broadcast(one(), 0), lambda: bagua.alltoall(one()), "
        "lambda: bagua.reducescatter(one()), lambda: bagua.add_process_set([0])"
    )
    result = run(
        1,
        f"""
calls = [{calls}]
for call in calls:
    expect_error(call)
bagua.init()
bagua.shutdown()
for call in calls:
    expect_error(call)
""",
        start="",
    )
    assert result.stdout[0].count("UsageError") == 22, result
    assert "no error" not in result.stdout[0]
    assert result.exit_code == 0, result
