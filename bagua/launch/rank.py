"""Stands between mpirun and the program on every rank: relays output, leaves no process behind.

Run by path as `python -IS rank.py [--fault-tolerant] [--own-gpu] [--suggest NAME=VALUE]… COMMAND…`,
so that it starts in a few milliseconds on the standard library alone; therefore it is all in one
file. Without bagua-run's variables (a command copied from --dry-run) it simply becomes the command.

The link to bagua-run carries frames of a one-byte kind, a four-byte length and the payload: hello
`H token rank host pid`, output `O` and `E`, `Z signal pid` when a signal has made the program stand
still or, then 0, when it goes on, and at the end `X code|signal number stopped words…`. Back come
orders without a payload: I (interrupt), T (terminate) and K (kill). A closed link means that bagua-
run has gone.

Standard input is rank 0's alone, the others read /dev/null. Rank 0's wrapper asks for a piece with
`R` and gets it in `S` (an empty one is the end); it asks for the next once the program has taken
this one, so that at most one piece is on its way and no order ever waits behind input.

Into the pipe that BAGUA_RUN_VERDICT_FD names, by descriptor:inode, a program writes words, a line
each: `init` when it calls bagua.init(), and `peer` if it ends because of another rank: then it is
not taken for the culprit.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import NamedTuple, NoReturn

CHANNEL = "BAGUA_RUN_CHANNEL"
TOKEN = "BAGUA_RUN_TOKEN"
VERDICT_FD = "BAGUA_RUN_VERDICT_FD"
THREADS = "OMP_NUM_THREADS"
FAULT_TOLERANT = "--fault-tolerant"
OWN_GPU = "--own-gpu"
SUGGEST = "--suggest"
GPUS = "CUDA_VISIBLE_DEVICES"
HEADER = struct.Struct("!cI")
CHUNK = 1 << 16
CONNECT_TIMEOUT_S = 10.0

# How long a program may take over each step of being stopped. mpirun kills this process one second
# after its SIGTERM, so the program and its children must be gone before that.
INTERRUPT_S = 5.0
TERMINATE_S = 3.0
MPIRUN_TERMINATE_S = 0.6
LEAVE_S = 15.0

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# Beyond what programs have open: one that is started without the descriptor (Python's subprocess
# closes it) must not find a file of its own under the number.
_VERDICT_FD_FROM = 200
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> NoReturn:
    fault_tolerant, argv = _told(FAULT_TOLERANT, argv)
    own_gpu, argv = _told(OWN_GPU, argv)
    command = _take_suggestions(argv)
    channel, token = os.environ.pop(CHANNEL, ""), os.environ.pop(TOKEN, "")
    _share_cores()
    if own_gpu:
        _take_gpu()
    if not channel:
        _become(command)
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    link = _connect(channel, rank)
    hello = f"{token} {rank} {socket.gethostname()} {os.getpid()}"
    link.sendall(frame(b"H", hello.encode()))
    status = Relay(link, command, has_input=rank == "0").run()
    if fault_tolerant and status != 0:
        # Open MPI tells survivors of a rank that died by a signal, not of one that exited.
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


class Relay:
    """The program, its pipes and the link, until the program has ended."""

    def __init__(self, link: socket.socket, command: list[str], has_input: bool) -> None:
        self._link: socket.socket | None = link
        self._received = bytearray()
        self._input = b""  # for the program, which has not taken it yet
        self._status: int | None = None
        self._stopped = False
        self._stopped_by_mpirun = False
        self._escalation: list[tuple[float, int]] = []  # (when, signal), soonest first
        self._selector = selectors.DefaultSelector()
        self._wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        _prctl(
            _PR_SET_CHILD_SUBREAPER, 1
        )  # orphaned grandchildren become ours, to be found and killed
        self._program = _spawn(command, has_input)
        for fd, kind in (
            (self._program.out, b"O"),
            (self._program.err, b"E"),
            (self._wake, b"W"),
            (link.fileno(), b"L"),
        ):
            self._selector.register(fd, selectors.EVENT_READ, kind)
        if has_input:
            self._send(b"R", b"")

    def run(self) -> int:
        """Relay until the program has ended, report how, and return its wait status."""
        while self._status is None:
            self._wait(self._seconds_to_escalation())
            self._escalate()
        self._kill_descendants()
        self._drain()
        how, number = "code", os.WEXITSTATUS(self._status)
        if os.WIFSIGNALED(self._status):
            how, number = "signal", os.WTERMSIG(self._status)
        end = [how, number, int(self._stopped), *_read_verdict(self._program.verdict)]
        self._send(b"X", " ".join(map(str, end)).encode())
        # bagua-run closes the link once the others are down too: were we to leave now, mpirun
        # would kill them without mercy for their children.
        deadline = time.monotonic() + LEAVE_S
        while (
            self._link is not None and time.monotonic() < deadline and not self._stopped_by_mpirun
        ):
            self._wait(deadline - time.monotonic())
        return self._status

    def _wait(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data == b"W":
                self._on_signals(os.read(key.fd, 512))
            elif key.data == b"L":
                self._on_link()
            elif key.data == b"I":
                self._selector.unregister(key.fd)
                self._feed()
            else:
                self._relay(key.fd, key.data)

    def _relay(self, fd: int, kind: bytes) -> bool:
        """Pass on what is there; False at the end of the pipe."""
        data = os.read(fd, CHUNK)
        if not data:
            self._selector.unregister(fd)
            return False
        self._send(kind, data)
        return True

    def _send(self, kind: bytes, payload: bytes) -> None:
        try:
            if self._link is not None:
                self._link.sendall(frame(kind, payload))
        except OSError:
            self._lose_link()

    def _on_link(self) -> None:
        if self._link is None:  # lost a moment ago, in sending
            return
        try:
            data = self._link.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            self._lose_link()
            return
        self._received += data
        while frame := take_frame(self._received):
            if self._status is not None:
                continue
            if frame[0] == b"S":
                self._input = frame[1]
                self._feed()
            else:
                self._obey(frame[0])

    def _obey(self, order: bytes) -> None:
        now, self._stopped = time.monotonic(), True
        interrupt = [(now, signal.SIGINT), (now + INTERRUPT_S, signal.SIGTERM)]
        terminate = [(now, signal.SIGTERM), (now + TERMINATE_S, signal.SIGKILL)]
        steps = {
            b"I": [*interrupt, (now + INTERRUPT_S + TERMINATE_S, signal.SIGKILL)],
            b"T": terminate,
        }
        self._escalation = list(steps.get(order, [(now, signal.SIGKILL)]))

    def _feed(self) -> None:
        """Give the program what it takes of the piece; ask for the next when it has it all."""
        fd = self._program.input
        try:
            if not self._input:
                os.close(fd)
                return
            self._input = self._input[os.write(fd, self._input) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the program reads no more, and is asked no more
            return
        if self._input:
            self._selector.register(fd, selectors.EVENT_WRITE, b"I")
        else:
            self._send(b"R", b"")

    def _lose_link(self) -> None:
        """bagua-run has closed the link: if the program still runs, nobody is left to want it."""
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link = None
        if self._status is None:
            self._escalation = [(time.monotonic(), signal.SIGKILL)]

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGCHLD in numbers:
            self._reap()
        if any(number in numbers for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
            now, self._stopped, self._stopped_by_mpirun = time.monotonic(), True, True
            self._escalation = [(now, signal.SIGTERM), (now + MPIRUN_TERMINATE_S, signal.SIGKILL)]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid != self._program.pid:
                continue
            if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                self._status = status
            elif not self._stopped:  # else it goes on only to end
                number = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else 0
                self._send(b"Z", f"{number} {pid}".encode())

    def _seconds_to_escalation(self) -> float | None:
        return max(0.0, self._escalation[0][0] - time.monotonic()) if self._escalation else None

    def _escalate(self) -> None:
        while (
            self._status is None and self._escalation and self._escalation[0][0] <= time.monotonic()
        ):
            number = self._escalation.pop(0)[1]
            if number == signal.SIGKILL:
                self._kill_descendants()
                continue
            try:
                os.killpg(self._program.pid, number)
                os.killpg(self._program.pid, signal.SIGCONT)  # a stopped program could not hear it
            except ProcessLookupError:
                pass

    def _kill_descendants(self) -> None:
        """Kill what is left below this process, new forks included, however it shields itself."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            pids = _descendants(os.getpid())
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.001)

    def _drain(self) -> None:
        """What the program wrote before it ended; who could still write to the pipes is dead."""
        for key in list(self._selector.get_map().values()):
            if key.data in (b"O", b"E"):
                os.set_blocking(key.fd, False)
                try:
                    while self._relay(key.fd, key.data):
                        pass
                except BlockingIOError:
                    self._selector.unregister(key.fd)


def frame(kind: bytes, payload: bytes) -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


def take_frame(received: bytearray) -> tuple[bytes, bytes] | None:
    """Take the first frame out of what was received, if it is there as a whole."""
    if len(received) < HEADER.size:
        return None
    kind, nbytes = HEADER.unpack_from(received)
    end = HEADER.size + nbytes
    if len(received) < end:
        return None
    payload = bytes(received[HEADER.size : end])
    del received[:end]
    return kind, payload


def _told(flag: str, argv: list[str]) -> tuple[bool, list[str]]:
    """Whether the first word is this flag, and what follows."""
    return (True, argv[1:]) if argv[:1] == [flag] else (False, argv)


def _take_suggestions(argv: list[str]) -> list[str]:
    """Sets the variables that nobody has set, and returns what follows."""
    while argv[:1] == [SUGGEST]:
        name, _, value = argv[1].partition("=")
        os.environ.setdefault(name, value)
        argv = argv[2:]
    return argv


def _first_of(variables: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in variables if name in os.environ), "")


def _take_gpu() -> None:
    """Leaves the program one GPU of those it would see: the local rank's."""
    visible = os.environ.get(GPUS)
    if visible is None:
        with contextlib.suppress(OSError):
            visible = ",".join(map(str, range(len(os.listdir("/proc/driver/nvidia/gpus")))))
    gpus = [gpu for gpu in (visible or "").split(",") if gpu]
    place, ranks = _first_of(_LOCAL_RANK_VARIABLES), _first_of(_LOCAL_SIZE_VARIABLES)
    problem = ""
    if not gpus:
        problem = f"no GPUs are told of by {GPUS} or NVIDIA's driver; ranks go on without one"
    elif ranks.isdigit() and int(ranks) > len(gpus):
        problem = f"{ranks} ranks here have to share {len(gpus)}"
    if problem and place in ("", "0"):
        print(f"bagua-run: --own-gpu on {socket.gethostname()}: {problem}", file=sys.stderr)
    if gpus and place.isdigit():
        os.environ[GPUS] = gpus[int(place) % len(gpus)]


def _share_cores() -> None:
    """The program's share of the cores as its number of threads, unless it has been told one.

    Libraries see a machine's cores or what mpirun binds to, and not how many ranks share them:
    left alone they start too many threads or just one. mpirun, this one's parent, has the cores of
    all, which the ranks it binds are spread over.
    """
    local_size = _first_of(_LOCAL_SIZE_VARIABLES)
    if THREADS not in os.environ and local_size.isdigit() and hasattr(os, "sched_getaffinity"):
        mine, theirs = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
        share = len(mine | theirs) // max(1, int(local_size))
        os.environ[THREADS] = str(max(1, min(share, len(mine))))


def _connect(channel: str, rank: str) -> socket.socket:
    """The link to bagua-run: `unix:NAME`, an abstract one, or `tcp:PORT:ADDRESS,ADDRESS…`.

    The addresses are tried in turn.
    """
    kind, _, where = channel.partition(":")
    reason: OSError | None = None
    port, _, addresses = where.partition(":")
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    targets = (
        [f"\0{where}"]
        if kind == "unix"
        else [(address, int(port)) for address in addresses.split(",")]
    )
    for target in targets:
        link = socket.socket(family, socket.SOCK_STREAM)
        link.settimeout(CONNECT_TIMEOUT_S)
        try:
            link.connect(target)
        except OSError as error:
            link.close()
            reason = error
            continue
        link.settimeout(None)
        return link
    sys.exit(
        f"bagua-run: rank {rank} on host {socket.gethostname()} cannot reach bagua-run at {where}: "
        f"{reason}; name an interface both hosts share with --network-interfaces"
    )


class _Program(NamedTuple):
    """The program's process and this end of its pipes."""

    pid: int
    out: int
    err: int
    verdict: int
    input: int  # -1 where the program reads /dev/null


def _spawn(command: list[str], has_input: bool) -> _Program:
    """The program in a process group of its own, and the pipes between it and this process."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    verdict_read, verdict_write = os.pipe()
    if has_input:
        input_read, input_write = os.pipe()
        os.set_blocking(input_write, False)
    else:
        input_read, input_write = os.open(os.devnull, os.O_RDONLY), -1
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(input_read, 0)
        os.dup2(out_write, 1)
        os.dup2(err_write, 2)
        inode = os.fstat(verdict_write).st_ino  # by which the program knows that it is this pipe
        os.environ[VERDICT_FD] = f"{_inheritable(verdict_write)}:{inode}"
        _become(command)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # here too: whichever process comes first
    for fd in (input_read, out_write, err_write, verdict_write):
        os.close(fd)
    return _Program(child, out_read, err_read, verdict_read, input_write)


def _inheritable(fd: int) -> int:
    """A copy of the descriptor that outlives exec, under a number nothing else has."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD, _VERDICT_FD_FROM)
    except OSError:  # the limit of open files is lower than that
        return fcntl.fcntl(fd, fcntl.F_DUPFD, 3)


def _read_verdict(fd: int) -> list[str]:
    """The words of the program, now ended."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, CHUNK).decode(errors="replace").split()
    except BlockingIOError:  # something it started, out of our reach, still holds the other end
        return []


def _become(command: list[str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, a program expects them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        reason = (
            f"bagua-run: cannot run {command[0]} on host {socket.gethostname()}: {error.strerror}\n"
        )
        os.write(2, reason.encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _descendants(root: int) -> list[int]:
    """Every living process below root, from /proc (none where there is no /proc)."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b") ")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found, front = [], [root]
    while front:
        front = [pid for parent in front for pid in children.get(parent, [])]
        found += front
    return found


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere a killed wrapper may leave its program to mpirun."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
