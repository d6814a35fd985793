"""bagua-run itself, over real mpirun: exit codes, deaths, output, environment, stopping."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bagua.launch.rank
from bagua.common.config import OPEN_MPI

SOURCE = Path(bagua.launch.__file__).parents[2]
RANK = "import os, sys, time, signal\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
TIMEOUT_S = 60
# Shields itself from everything that can be shielded from.
SLEEPER = (
    "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(100)"
)


def start(*arguments, environment=None, stdin=subprocess.DEVNULL):
    variables = {**os.environ, "PYTHONPATH": str(SOURCE), **(environment or {})}
    variables = {name: value for name, value in variables.items() if value is not None}
    return subprocess.Popen(
        [sys.executable, "-m", "bagua.launch", *map(str, arguments)],
        env=variables,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments, **how):
    with start(*arguments, **how) as job:
        out, err = job.communicate(timeout=TIMEOUT_S)
    return job.returncode, out, err


def code(text):
    return [sys.executable, "-c", RANK + text]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_service_has_no_home():
    program = [sys.executable, "-c", "import bagua; bagua.init(); print(bagua.size())"]
    result, out, err = run("-np", 2, *program, environment={"HOME": None})
    assert (result, sorted(out.splitlines())) == (0, ["[0] 2", "[1] 2"]), err
    homeless = {name: value for name, value in os.environ.items() if name != "HOME"}
    alone = subprocess.run(program, env=homeless, capture_output=True, text=True, cwd=SOURCE)
    assert (alone.returncode, alone.stdout) == (0, "1\n"), alone.stderr


def test_output_is_prefixed_and_keeps_its_stream():
    result, out, err = run(
        "-np", 2, *code("print('out', rank); print('err', rank, file=sys.stderr)")
    )
    assert result == 0
    assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_more_ranks_than_cores_and_a_working_mpi():
    count = len(os.sched_getaffinity(0)) + 1
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1), MPI.COMM_WORLD.rank)"
    result, out, _ = run("-np", count, *code(program))
    assert result == 0
    assert sorted(out.splitlines()) == sorted(f"[{rank}] {count} {rank}" for rank in range(count))


def test_an_exit_code_ends_the_job_and_is_shown_last():
    program = "print('bye', rank)\nif rank == 1: sys.exit(3)\ntime.sleep(100)"
    result, out, err = run("-np", 2, *code(program))
    assert result == 3
    assert "[1] bye 1" in out
    assert re.fullmatch(r"bagua-run: rank 1 on host \S+ exited with code 3", err.splitlines()[-1])
    assert "[1] bye 1" in err.splitlines()[-2]
    assert "prterun" not in err


def test_a_signal_ends_the_job_and_all_descendants(tmp_path):
    program = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
open({str(tmp_path)!r} + f"/{{rank}}", "w").write(str(child.pid))
while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.01)
if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""
    result, _, err = run("-np", 2, *code(program))
    assert result == 128 + signal.SIGKILL
    assert err.splitlines()[-1].endswith(
        "was killed by signal 9 (SIGKILL), as the kernel does when memory runs out"
    )
    pids = [int((tmp_path / name).read_text()) for name in ("0", "1")]
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_leaves_nothing_behind(number):
    program = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
print("pids", os.getpid(), os.getppid(), child.pid)
time.sleep(100)
"""
    with start("-np", 2, *code(program)) as job:
        lines = [job.stdout.readline() for _ in range(2)]
        job.send_signal(number)
        _, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 128 + number
    assert err.splitlines()[-1] == f"bagua-run: stopped by {signal.Signals(number).name}"
    pids = [int(word) for line in lines for word in line.split()[2:]]
    assert len(pids) == 6
    assert not any(alive(pid) for pid in pids)


def test_a_second_interrupt_kills_at_once():
    program = (
        "[signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; print(os.getpid()); time.sleep(99)"
    )
    with start("-np", 2, *code(program)) as job:
        pids = [int(job.stdout.readline().split()[1]) for _ in range(2)]
        job.send_signal(signal.SIGINT)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 128 + signal.SIGINT
    assert not any(alive(pid) for pid in pids)


def test_survivors_go_on_when_fault_tolerant():
    program = """
import mpi4py; mpi4py.rc.finalize = False
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Set_errhandler(MPI.ERRORS_RETURN)
if rank == 1: os._exit(7)
try: world.Barrier()
except MPI.Exception as error: print("survived", error.Get_error_class() == MPI.ERR_PROC_FAILED)
os._exit(int(sys.argv[1]))
"""
    result, out, err = run("-np", 3, "--fault-tolerant", *code(program), 0)
    assert result == 0
    assert sorted(out.splitlines()) == ["[0] survived True", "[2] survived True"]
    assert "rank 1 on host" in err
    assert "exited with code 7" in err


def test_too_few_files_are_told():
    """Wherever bagua-run notices."""
    for most in (6, 10, 12):
        command = [sys.executable, "-m", "bagua.launch", "-np", "1", "true"]
        result = subprocess.run(
            ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *command],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith("bagua-run: Too many open files")
        assert f"allows {most} in a process (ulimit -n)" in line


def test_the_engine_s_survivors_end_well_when_fault_tolerant():
    program = """
import signal, bagua, numpy as np
bagua.init()
try:
    bagua.barrier()
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    bagua.barrier()
except bagua.PeerError: bagua.shutdown()
if sys.argv[1] == "go on":
    bagua.init([0, 2])
    print("total", bagua.allreduce(np.ones(1), op=bagua.Sum)[0])
"""
    result, out, err = run("-np", 3, "--fault-tolerant", *code(program), "go on")
    assert result == 0, err
    assert sorted(out.splitlines()) == ["[0] total 2.0", "[2] total 2.0"]
    assert "this job failed" not in err
    result, _, err = run("-np", 3, "--fault-tolerant", *code(program), "end")
    assert result != 0
    assert "this job failed: rank 1" in err


def test_environment_and_settings_reach_the_ranks_and_our_own_variables_do_not():
    program = (
        "print({k: v for k, v in os.environ.items() if k.startswith('BAGUA_') or k == 'MINE'})"
    )
    own = {"BAGUA_CUDA": None}  # which builds may set for all that follows
    result, out, _ = run(
        "-np", 1, "-x", "MINE=a b", "--fusion-mb", 3, *code(program), environment=own
    )
    assert result == 0
    mine = r"{'MINE': 'a b', 'BAGUA_FUSION_MB': '3', 'BAGUA_RUN_VERDICT_FD': '200:\d+'}"
    assert re.fullmatch(rf"\[0\] {mine}\n", out), out


def test_what_is_suggested_gives_way():
    program = "print(os.environ['OMPI_MCA_btl_tcp_eager_limit'])"
    for words, given, limit in (
        ((), None, OPEN_MPI["OMPI_MCA_btl_tcp_eager_limit"]),
        ((), "70000", "70000"),
        (("--mpi-args", "--mca btl_tcp_eager_limit 70000"), None, "70000"),
    ):
        environment = {"OMPI_MCA_btl_tcp_eager_limit": given}
        _, out, _ = run("-np", 1, *words, *code(program), environment=environment)
        assert out == f"[0] {limit}\n"


def test_ranks_share_the_cores():
    cores = len(os.sched_getaffinity(0))
    program = "print(os.environ['OMP_NUM_THREADS'])"
    unset = {"OMP_NUM_THREADS": None}
    _, out, _ = run("-np", 1, *code(program), environment=unset)
    assert out == f"[0] {cores}\n"
    _, out, _ = run("-np", 2, *code(program), environment=unset)
    assert out.split()[1::2] == [str(max(1, cores // 2))] * 2
    _, out, _ = run("-np", 2, "-x", "OMP_NUM_THREADS=7", *code(program), environment=unset)
    assert out.split()[1::2] == ["7", "7"]


@pytest.mark.parametrize(
    ("own", "machine", "local_size", "threads"),
    [
        (range(16), range(16), 2, 8),  # bound to nothing
        (range(8), range(16), 2, 8),  # to a socket each
        (range(8), range(16), 4, 4),  # to a socket of two ranks
        (range(1), range(16), 2, 1),  # to a core
        (range(2), range(2), 3, 1),
    ],
)
def test_a_rank_that_is_bound_has_its_cores(monkeypatch, own, machine, local_size, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(machine if pid else own))
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(local_size))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    bagua.launch.rank._share_cores()
    assert os.environ["OMP_NUM_THREADS"] == str(threads)


def test_a_rank_sees_a_gpu_of_its_own():
    program = "print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    seen = {"CUDA_VISIBLE_DEVICES": "4,GPU-7"}
    _, out, err = run("-np", 3, "--own-gpu", *code(program), environment=seen)
    assert sorted(out.splitlines()) == ["[0] 4", "[1] GPU-7", "[2] 4"]
    assert err.count("3 ranks here have to share 2") == 1
    _, out, err = run("-np", 1, "--own-gpu", "--fault-tolerant", *code(program), environment=seen)
    assert out == "[0] 4\n"
    assert "--own-gpu" not in err
    _, out, err = run(
        "-np", 2, "--own-gpu", *code(program), environment={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert err.count("ranks go on without one") == 1
    _, out, _ = run("-np", 1, *code(program), environment=seen)
    assert out == "[0] 4,GPU-7\n"


def test_output_filename(tmp_path):
    result, out, _ = run(
        "-np", 2, "--output-filename", tmp_path / "logs", *code("print('hi', rank)")
    )
    assert result == 0
    assert "[1] hi 1" in out
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "hi 1\n"
    assert (tmp_path / "logs" / "rank.1" / "stderr").read_text() == ""


def test_a_large_output_arrives_whole():
    result, out, _ = run(
        "-np", 2, *code("for i in range(20000): sys.stdout.write(f'{rank} {i}\\n')")
    )
    assert result == 0
    for rank in (0, 1):
        mine = [line for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] {rank} {i}" for i in range(20000)]


def test_dry_run_prints_a_command_that_runs():
    result, out, _ = run("-np", 2, "--dry-run", *code("print('it is', rank)"))
    assert result == 0
    copied = subprocess.run(shlex.split(out), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert sorted(copied.stdout.splitlines()) == ["it is 0", "it is 1"]


def test_usage_errors_say_one_line_and_exit_2():
    result, out, err = run("-np", 2, "no-such-program")
    assert (result, out, err) == (2, "", "bagua-run: there is no program no-such-program\n")


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_output_is_a_usage_error(closed):
    command = shlex.join([sys.executable, "-m", "bagua.launch", "-np", "1", "true"])
    done = subprocess.run(
        ["sh", "-c", f"{command} {closed}>&-"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2
    said = "" if closed == 2 else "bagua-run: standard output or standard error is closed"
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr


def test_interfaces_that_are_not_here_are_told_before_the_start():
    result, _, err = run("-np", 2, "--network-interfaces", "lo,nope", "true")
    assert result == 2
    assert "--network-interfaces: no interface 'nope' here" in err


def test_bad_settings_are_told_once_before_the_start():
    result, _, err = run("-np", 2, "true", environment={"BAGUA_FUSION_BM": "3"})
    assert result == 2
    assert "did you mean 'BAGUA_FUSION_MB'?" in err
    assert len(err.splitlines()) == 1


def test_rank_0_reads_a_file_to_its_end(tmp_path):
    path = tmp_path / "lines"
    path.write_text("x" * 300_000 + "\n")  # many pieces, and more than a pipe holds
    with open(path) as file:
        result, out, _ = run("-np", 2, "wc", "-c", stdin=file)
    assert (result, sorted(out.splitlines())) == (0, ["[0] 300001", "[1] 0"])


def test_rank_0_reads_a_pipe_as_it_is_written():
    program = "for line in sys.stdin: print(line.upper(), end='')\nprint('end')"
    with start("-np", 2, *code(program), stdin=subprocess.PIPE) as job:
        assert job.stdout.readline() == "[1] end\n"
        for text in ("one", "two"):
            print(text, file=job.stdin, flush=True)
            assert job.stdout.readline() == f"[0] {text.upper()}\n"
        job.stdin.close()
        assert job.stdout.readline() == "[0] end\n"
        assert job.wait(TIMEOUT_S) == 0


def test_input_that_never_ends_or_was_never_there_holds_nothing_up():
    with start("-np", 2, "head", "-n", 1, stdin=subprocess.PIPE) as job:
        print("only this", file=job.stdin, flush=True)
        assert job.stdout.readline() == "[0] only this\n"
        assert job.wait(TIMEOUT_S) == 0
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "bagua.launch"]
    done = subprocess.run(
        [*closed, "-np", "2", "cat"], cwd=SOURCE, capture_output=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stdout) == (0, b"")


def test_a_killed_job_leaves_no_file_and_no_rank(tmp_path):
    program = "print(os.getpid(), os.getppid()); time.sleep(100)"
    with start("-np", 2, *code(program), environment={"TMPDIR": str(tmp_path)}) as job:
        pids = [int(pid) for _ in range(2) for pid in job.stdout.readline().split()[1:]]
        job.kill()
        job.communicate(timeout=TIMEOUT_S)
    assert len(pids) == 4
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
    assert not list(tmp_path.glob("bagua-run*"))


def test_importing_the_launcher_loads_neither_torch_nor_mpi():
    program = "import sys, bagua.launch.run; print({'torch', 'mpi4py', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=SOURCE, check=True
    )
    assert done.stdout == "set()\n"


def test_check_build_is_a_checklist():
    result, out, _ = run("--check-build")
    built = re.search(r"\[(.)\] extension", out)
    assert result == (0 if built[1] == "X" else 1)
    assert "[X] mpirun" in out
    assert "[X] mpi4py" in out
    if built[1] == "X":
        assert "Transports:" in out
        assert "[X] mpi" in out
    else:
        assert "pip install ." in out
    if "[X] CUDA" in out and not Path("/proc/driver/nvidia/version").exists():
        assert "[ ] GPU: no cuda device, and no driver of NVIDIA's\n" in out
        assert re.search(r"\[ \] NCCL: not needed|\[X\] NCCL: \d", out)  # torch may have brought it


def test_the_checklist_starts_no_mpi():
    """Which might leave files behind."""
    program = (
        "from bagua.launch.check_build import report; report(); "
        "from mpi4py import MPI; print(MPI.Is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=SOURCE, check=True
    )
    assert done.stdout == "False\n"


def test_a_closed_output_ends_the_job():
    with start("-np", 2, "yes") as job:
        assert job.stdout.readline() in ("[0] y\n", "[1] y\n")
        job.stdout.close()
        assert job.wait(TIMEOUT_S) == 128 + signal.SIGPIPE


def test_ranks_that_never_start_are_named(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "(Open MPI) 5.0" || exec sleep 100\n'
    )
    mpirun.chmod(0o755)
    result, _, err = run("-np", 2, "--mpirun", mpirun, "--start-timeout", 0.3, "true")
    assert result == 1
    assert "2 of 2 ranks have not started within 0.3 s: 0, 1" in err


@pytest.mark.slow
def test_the_algorithm_is_chosen_on_the_command_line():
    train = """
import bagua.torch, torch
bagua.torch.init()
model = torch.nn.Linear(100, 100)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = bagua.torch.DistributedOptimizer(sgd, model.named_parameters())
model(torch.randn(4, 100)).sum().backward()
optimizer.step()
print(optimizer.algorithm)
"""
    result, out, err = run("-np", 2, "--algorithm", "local_sgd", *code(train))
    assert result == 0, err
    assert sorted(out.splitlines()) == ["[0] LocalSGD()", "[1] LocalSGD()"]
    result, out, err = run("-np", 2, "--algorithm", "locl_sgd", *code(train))
    assert result == 1
    assert "did you mean 'local_sgd'?" in err
    script = train.replace("named_parameters())", "named_parameters(), algorithm='bytegrad')")
    result, out, err = run("-np", 2, "--algorithm", "local_sgd", *code(script))
    assert result == 0, err
    assert sorted(out.splitlines()) == ["[0] ByteGrad()", "[1] ByteGrad()"]
    assert err.count("the script's choice, ByteGrad(), overrules the setting 'local_sgd'") == 1
