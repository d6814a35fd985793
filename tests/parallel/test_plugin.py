"""The plugin at work on small test files, in a pytest of its own with real MPI processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import missing
from parallel.processes import is_running

TESTS = Path(__file__).parents[1]
HEADER = """
import os, signal, time
import pytest
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{TESTS.parent}")
    # The collecting process is a world of one; Open MPI never removes the shared memory of such.
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(pytester.path))
    pytester.makeini("[pytest]\naddopts = --import-mode=importlib -p no:randomly\n")
    pytester.makeconftest("pytest_plugins = ('parallel.plugin',)")

    def run(source: str, *args: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=HEADER + source)
        return pytester.runpytest_subprocess(*args, timeout=200)

    return run


def test_each_count_runs_on_that_many_ranks(run, pytester):
    result = run("""
@pytest.mark.ranks(1, 2, 3)
def test_world(ranks):
    assert MPI.COMM_WORLD.size == ranks
    assert MPI.COMM_WORLD.allreduce(1) == ranks
    open(f"ran.{ranks}.{rank}", "w").close()

def test_here():
    assert MPI.COMM_WORLD.size == 1
    open("ran.here", "w").close()
""")
    result.assert_outcomes(passed=4)
    ran = sorted(path.name for path in pytester.path.glob("ran.*"))
    assert ran == ["ran.1.0", "ran.2.0", "ran.2.1", "ran.3.0", "ran.3.1", "ran.3.2", "ran.here"]


def test_an_environment_is_that_of_a_job_of_its_own(run, pytester):
    result = run("""
def seen(number):
    open(f"seen.{number}.{os.environ.get('GIVEN')}.{os.getppid()}", "w").close()

@pytest.mark.ranks(1)
@pytest.mark.rank_env(GIVEN="given")
def test_first():
    seen(1)

@pytest.mark.ranks(1)
def test_second():
    seen(2)

@pytest.mark.ranks(1)
@pytest.mark.rank_env(GIVEN="given")
def test_third():
    seen(3)
""")
    result.assert_outcomes(passed=3)
    seen = sorted(path.name.split(".")[1:] for path in pytester.path.glob("seen.*"))
    assert [(number, given) for number, given, _ in seen] == [
        ("1", "given"),
        ("2", "None"),
        ("3", "given"),
    ]
    assert seen[0][2] == seen[2][2] != seen[1][2]


ON_HOSTS = """
import socket

@pytest.mark.ranks((2, 1), (1, 1))
def test_hosts(ranks):
    names = MPI.COMM_WORLD.allgather(socket.gethostname())
    assert tuple(names.count(name) for name in dict.fromkeys(names)) == ranks
    assert rank != 2, "the other host"
"""


def test_ranks_of_several_hosts(run):
    if reason := missing():
        pytest.skip(reason)
    result = run(ON_HOSTS)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*rank 2 of 3*", "*AssertionError: the other host"])
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_hosts[[]np2+1[]]*"])
    spread = run(ON_HOSTS.replace("(2, 1), (1, 1)", "2, 3"), "--hosts=2")
    spread.assert_outcomes(passed=1, failed=1)
    spread.stdout.fnmatch_lines(["FAILED test_it.py::test_hosts[[]np2+1[]]*"])


def test_without_hosts_their_tests_are_skipped(run, monkeypatch, tmp_path):
    (tmp_path / "ip").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run(ON_HOSTS, "-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*network namespaces need*"])


def test_failure_on_one_rank_shows_that_rank_and_spares_the_next_test(run):
    result = run("""
@pytest.mark.ranks(3)
def test_fails():
    print("printed by", rank)
    assert rank != 1, "not me"

@pytest.mark.ranks(3)
def test_after():
    assert MPI.COMM_WORLD.allreduce(1) == 3
""")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 3*", "*AssertionError: not me", "printed by 1"])
    result.stdout.no_fnmatch_line("*rank 0 of 3*")
    result.stdout.fnmatch_lines(
        ["FAILED test_it.py::test_fails[[]np3[]] - AssertionError: not me*"]
    )


def test_hang_shows_the_stacks_of_the_ranks_that_hang(run):
    result = run("""
def wait_for_ever():
    while True:
        time.sleep(1)

@pytest.mark.ranks(2, timeout_s=3)
def test_hangs():
    if rank == 1:
        wait_for_ever()

@pytest.mark.ranks(2)
def test_after():
    assert MPI.COMM_WORLD.allreduce(1) == 2
""")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*ranks [[]1[]] were not done after 3 s*", "*in wait_for_ever*"])


def test_stopped_rank_is_ended_too(run):
    result = run("""
@pytest.mark.ranks(2, timeout_s=3)
def test_stops():
    if rank == 0:
        open("pid", "w").write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
""")
    result.assert_outcomes(failed=1)
    assert not is_running(int(Path("pid").read_text()))


def test_failed_rank_does_not_let_the_others_wait_in_vain(run):
    result = run("""
@pytest.mark.ranks(2, timeout_s=1000)
def test_fails():
    assert rank == 0, "never joins"
    MPI.COMM_WORLD.barrier()
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*AssertionError: never joins*", "*after another rank had failed*"]
    )


def test_crash_fails_its_test_and_the_others_go_on(run):
    result = run("""
@pytest.mark.ranks(2)
def test_before():
    pass

@pytest.mark.ranks(2)
def test_crashes():
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    MPI.COMM_WORLD.barrier()

@pytest.mark.ranks(2)
def test_after():
    assert MPI.COMM_WORLD.allreduce(1) == 2
""")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*test_crashes*", "*the job ended with exit code*", "*Segmentation fault*"]
    )


def test_crash_at_exit_is_not_lost(run):
    result = run("""
import atexit

@pytest.mark.ranks(2)
def test_passes():
    atexit.register(os._exit, 7)
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*all items ran, but the job ended with exit code 7*"])


def test_job_that_cannot_start_fails_every_test_of_it(run):
    result = run("""
if MPI.COMM_WORLD.size == 2:
    raise RuntimeError("no such thing here")

@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("x", "ab")
def test_it(x):
    pass
""")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*2 ranks did not get ready*", "*no such thing here*"])


def test_skips_only_if_all_ranks_skip(run):
    result = run("""
@pytest.mark.ranks(2)
def test_all():
    pytest.skip("nobody")

@pytest.mark.ranks(2)
def test_one():
    if rank == 1:
        pytest.skip("not me")

@pytest.mark.skip(reason="marked")
@pytest.mark.ranks(2)
def test_marked():
    assert False

@pytest.mark.xfail(strict=True)
@pytest.mark.ranks(2)
def test_xfails():
    assert False
""")
    result.assert_outcomes(passed=1, skipped=2, xfailed=1)


def test_error_in_a_fixture(run):
    result = run("""
@pytest.fixture
def broken():
    raise ValueError("broken on all")

@pytest.mark.ranks(2)
def test_it(broken):
    pass
""")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*rank 0 of 2, rank 1 of 2*", "*ValueError: broken on all"])


def test_selection_by_keyword_id_last_failed_and_first_failure(run):
    source = """
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("x", [1, 2, 3])
def test_it(x):
    assert x != 2
"""
    run(source, "-k", "np2 and not np2-2").assert_outcomes(passed=2, deselected=4)
    run(source, "test_it.py::test_it[np2-1]").assert_outcomes(passed=1)
    run(source).assert_outcomes(passed=4, failed=2)
    run(source, "--lf").assert_outcomes(failed=2)
    run(source, "-x").assert_outcomes(passed=1, failed=1)


def test_rank_output_passes_through(run):
    result = run(
        """
@pytest.mark.ranks(2)
def test_it():
    print("hello from", rank, flush=True)
""",
        "--rank-output",
    )
    result.assert_outcomes(passed=1)
    for rank in range(2):
        result.stdout.fnmatch_lines_random([f"*hello from {rank}*"])


def test_run_ranks_gives_each_ranks_output(run_ranks):
    result = run_ranks(
        2,
        """
import os, sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
print("out", rank, sys.argv[1], os.environ["GIVEN"], os.environ["OMP_NUM_THREADS"])
print("err", rank, file=sys.stderr)
""",
        "argument",
        env={"GIVEN": "given"},
    )
    assert result.exit_code == 0, result
    assert result.stdout == [f"out {rank} argument given 1\n" for rank in range(2)]
    assert result.stderr == ["err 0\n", "err 1\n"]
    assert not result.timed_out


def test_run_ranks_gives_the_exit_code(run_ranks):
    assert run_ranks(1, "import sys\nsys.exit(3)").exit_code == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_run_ranks_ends_when_a_rank_is_killed_or_stopped(run_ranks, number):
    result = run_ranks(
        2,
        f"""
import os, time
print(os.getpid(), flush=True)
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    os.kill(os.getpid(), {int(number)})
time.sleep(1)
print("survived", flush=True)
""",
        fault_tolerant=True,
    )
    assert not result.timed_out, result
    assert "survived" in result.stdout[0]
    assert "survived" not in result.stdout[1]
    assert not is_running(int(result.stdout[1]))


def test_run_ranks_ends_what_hangs_and_what_left_its_parent(run_ranks):
    result = run_ranks(
        1,
        """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
child = subprocess.Popen(sleep, start_new_session=True)
print(child.pid, flush=True)
time.sleep(1000)
""",
        timeout_s=3,
    )
    assert result.timed_out
    assert result.exit_code is None
    assert not is_running(int(result.stdout[0]))


def test_runs_under_this_python(run_ranks):
    result = run_ranks(1, "import sys\nprint(sys.executable)")
    assert os.path.samefile(result.stdout[0].strip(), sys.executable)
