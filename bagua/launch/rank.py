"""Stands between mpirun and the program on every rank: relays output, leaves no process behind.

Run by path as `python -IS rank.py [--fault-tolerant] COMMAND…`, so that it starts in a few
milliseconds on the standard library alone. Without bagua-run's variables (a command copied from
--dry-run) it simply becomes the command.

The link to bagua-run carries frames of a one-byte kind, a four-byte length and the payload:
hello `H token rank host pid`, output `O` and `E`, and at the end `X code|signal number stopped`.
Back come single bytes: I (interrupt), T (terminate) and K (kill). A closed link means that
bagua-run has gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import NoReturn

CHANNEL = "BAGUA_RUN_CHANNEL"
TOKEN = "BAGUA_RUN_TOKEN"
FAULT_TOLERANT = "--fault-tolerant"
HEADER = struct.Struct("!cI")
CHUNK = 1 << 16
CONNECT_TIMEOUT_S = 10.0

# How long a program may take over each step of being stopped. mpirun kills this process one second
# after its SIGTERM, so the program and its children must be gone before that.
INTERRUPT_S = 5.0
TERMINATE_S = 3.0
MPIRUN_TERMINATE_S = 0.6
LEAVE_S = 10.0

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> NoReturn:
    fault_tolerant = argv[:1] == [FAULT_TOLERANT]
    command = argv[1:] if fault_tolerant else argv
    channel, token = os.environ.pop(CHANNEL, ""), os.environ.pop(TOKEN, "")
    if not channel:
        _become(command)
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    link = _connect(channel, rank)
    hello = f"{token} {rank} {socket.gethostname()} {os.getpid()}"
    link.sendall(_frame(b"H", hello.encode()))
    status = Relay(link, command).run()
    if fault_tolerant and status != 0:
        # Open MPI tells survivors of a rank that died by a signal, not of one that exited.
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


class Relay:
    """The program, its two pipes and the link, until the program has ended."""

    def __init__(self, link: socket.socket, command: list[str]) -> None:
        self._link: socket.socket | None = link
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
        self._child, pipes = _spawn(command)
        for fd, kind in ((pipes[0], b"O"), (pipes[1], b"E"), (self._wake, b"W")):
            self._selector.register(fd, selectors.EVENT_READ, kind)
        self._selector.register(link, selectors.EVENT_READ, b"L")

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
        self._send(b"X", f"{how} {number} {int(self._stopped)}".encode())
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
                self._link.sendall(_frame(kind, payload))
        except OSError:
            self._lose_link()

    def _on_link(self) -> None:
        assert self._link is not None
        try:
            orders = self._link.recv(64)
        except OSError:
            orders = b""
        if not orders:
            self._lose_link()
        elif self._status is None:
            order = orders[-1:]
            now, self._stopped = time.monotonic(), True
            interrupt = [(now, signal.SIGINT), (now + INTERRUPT_S, signal.SIGTERM)]
            terminate = [(now, signal.SIGTERM), (now + TERMINATE_S, signal.SIGKILL)]
            steps = {
                b"I": [*interrupt, (now + INTERRUPT_S + TERMINATE_S, signal.SIGKILL)],
                b"T": terminate,
            }
            self._escalation = list(steps.get(order, [(now, signal.SIGKILL)]))

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
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child:
                self._status = status

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
                os.killpg(self._child, number)
                os.killpg(self._child, signal.SIGCONT)  # a stopped program could not hear it
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


def _frame(kind: bytes, payload: bytes) -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


def _connect(channel: str, rank: str) -> socket.socket:
    """The link to bagua-run: `unix:PATH`, or `tcp:PORT:ADDRESS,ADDRESS…`, tried in turn."""
    kind, _, where = channel.partition(":")
    reason: OSError | None = None
    port, _, addresses = where.partition(":")
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    targets = (
        [where] if kind == "unix" else [(address, int(port)) for address in addresses.split(",")]
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


def _spawn(command: list[str]) -> tuple[int, tuple[int, int]]:
    """The program in a process group of its own, and the pipes it writes to."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(out_write, 1)
        os.dup2(err_write, 2)
        _become(command)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # here too: whichever process comes first
    os.close(out_write)
    os.close(err_write)
    return child, (out_read, err_read)


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
