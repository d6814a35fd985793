"""MPI processes of a test: mpirun's command line, and the end of everything that it started."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Callable, Union

# Every process of a job inherits this variable; its value is the job's own. It finds also those
# processes that left their parent, their session or their process group.
MARK = "PYTEST_RANKS_JOB"

# How many ranks; or how many on each of several hosts, which are network namespaces.
Layout = Union[int, tuple[int, ...]]


def count(layout: Layout) -> int:
    return layout if isinstance(layout, int) else sum(layout)


def name_of(layout: Layout) -> str:
    """
    >>> name_of(3), name_of((2, 1))
    ('np3', 'np2+1')
    """
    return "np" + (str(layout) if isinstance(layout, int) else "+".join(map(str, layout)))


@functools.cache
def mpirun() -> tuple[str, bool]:
    """The mpirun of this Python's environment, else that on PATH; and whether it is Open MPI's."""
    beside_python = str(Path(sys.executable).parent)
    path = shutil.which("mpirun", path=beside_python) or shutil.which("mpirun")
    if path is None:
        raise FileNotFoundError("no mpirun, neither beside this Python nor on PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return path, "Open MPI" in version.stdout


def mpirun_command(n: int, *, fault_tolerant: bool = False) -> list[str]:
    path, is_open_mpi = mpirun()
    command = [path, "-n", str(n)]
    if is_open_mpi:
        command += ["--oversubscribe", "--bind-to", "none"]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += ["--with-ft", "ulfm"] if fault_tolerant else []
    elif fault_tolerant:
        command.insert(1, "-disable-auto-cleanup")
    return command


@contextlib.contextmanager
def world_command(layout: Layout, *, fault_tolerant: bool = False) -> Iterator[list[str]]:
    """The beginning of a command that starts ranks; hosts last as long as the context."""
    if isinstance(layout, int):
        yield mpirun_command(layout, fault_tolerant=fault_tolerant)
        return
    from benchmarks.hosts import Hosts

    with Hosts(len(layout), "10gbit") as hosts, hosts.mpirun(layout) as command:
        yield [*command, *(["--with-ft", "ulfm"] if fault_tolerant else [])]


@dataclass
class MpiProcesses:
    """An mpirun and all that descends from it. `stop` leaves nothing behind, whatever its state."""

    process: subprocess.Popen[bytes]
    mark: str

    @classmethod
    def start(
        cls, command: list[str], output: IO[bytes] | None, env: dict[str, str]
    ) -> MpiProcesses:
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env, MARK: mark},
            start_new_session=True,
        )
        return cls(process, mark)

    def pids(self) -> list[int]:
        wanted = f"{MARK}={self.mark}".encode()
        return [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, wanted)
        ]

    def wait(self, timeout_s: float) -> int | None:
        """mpirun's exit code, or None when it still runs after `timeout_s`."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        # First all but mpirun, which then ends by itself and removes its files. A stopped process
        # (SIGSTOP) obeys SIGKILL too.
        kill(pid for pid in self.pids() if pid != self.process.pid)
        self.wait(3)
        while pids := self.pids():
            kill(pids)
            time.sleep(0.01)
        self.process.wait()


def _has(pid: int, variable: bytes) -> bool:
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or somebody else's
        return False


def kill(pids, number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def is_running(pid: int) -> bool:
    """False when the process is gone, a zombie, or stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "TtZX"


@dataclass
class RanksResult:
    """What a program did under mpirun. `exit_code` is mpirun's, None if it had to be stopped."""

    exit_code: int | None
    timed_out: bool
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    mpirun_output: str = ""

    def __str__(self) -> str:
        parts = [f"exit code {self.exit_code}, timed out: {self.timed_out}", self.mpirun_output]
        for rank, (out, err) in enumerate(zip(self.stdout, self.stderr)):
            parts += [f"--- rank {rank} stdout", out, f"--- rank {rank} stderr", err]
        return "\n".join(parts)


def make_run_ranks(directory: Path) -> Callable[..., RanksResult]:
    """The `run_ranks` fixture: starts a program on n ranks and waits until none runs any more."""

    def run_ranks(
        layout: Layout,
        source_or_path: str | Path,
        *args: str,
        timeout_s: float = 60,
        fault_tolerant: bool = False,
        env: dict[str, str] | None = None,
    ) -> RanksResult:
        here = directory / uuid.uuid4().hex
        here.mkdir()
        script = Path(source_or_path) if isinstance(source_or_path, Path) else here / "script.py"
        if script.parent == here:
            script.write_text(source_or_path)  # type: ignore[arg-type]
        n = count(layout)
        with world_command(layout, fault_tolerant=fault_tolerant) as command:
            command += [sys.executable, __file__, str(here), str(script), *args]
            with (here / "mpirun").open("wb") as output:
                processes = MpiProcesses.start(command, output, env or {})
            try:
                timed_out = not _until_none_runs(processes, here, n, timeout_s)
                exit_code = processes.wait(0 if timed_out else 2)
            finally:
                processes.stop()
        streams = [
            [_text(here / f"{stream}.{rank}") for rank in range(n)]
            for stream in ("stdout", "stderr")
        ]
        return RanksResult(exit_code, timed_out, *streams, mpirun_output=_text(here / "mpirun"))

    return run_ranks


def _until_none_runs(processes: MpiProcesses, here: Path, n: int, timeout_s: float) -> bool:
    """A rank that was stopped does not end, and neither does its mpirun: nobody waits for them."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ranks = [int(file.suffix[1:]) for file in here.glob("pid.*")]
        if processes.wait(0.02) is not None or (
            len(ranks) == n and not any(map(is_running, ranks))
        ):
            return True
    return False


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _become(here: str, *program: str) -> None:
    """Runs in each rank: sends its output to files of its own, then becomes the program."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    rank = next(os.environ[name] for name in names if name in os.environ)
    for fd, stream in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{here}/{stream}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, fd)
    Path(here, f"pid.{os.getpid()}").touch()
    os.execv(sys.executable, [sys.executable, "-u", *program])


if __name__ == "__main__":
    _become(*sys.argv[1:])
