"""bagua-run's end of the links to its ranks: their output, how each ended, and orders to stop."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import secrets
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from bagua.common.config import nearest
from bagua.common.errors import UsageError
from bagua.launch import rank as rank_process

INTERRUPT, TERMINATE, KILL = b"I", b"T", b"K"

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Exit:
    """How a rank ended."""

    rank: int
    host: str
    code: int = 0
    signal: int = 0
    stopped: bool = (
        False  # it was told to stop before it ended, so it is a victim rather than a cause
    )
    began: bool = False  # it said that it called bagua.init()
    peer: bool = False  # it said that it ended because of another rank: a victim too
    lost: bool = False  # its link broke: how it ended is not known
    halted: int = 0  # the signal that had made it stand still, until it was ended

    @property
    def failed(self) -> bool:
        return bool(self.code or self.signal or self.lost)

    @property
    def shell_code(self) -> int:
        """The exit code a shell would give it."""
        return 128 + self.signal if self.signal else self.code or int(self.lost)

    def __str__(self) -> str:
        if self.lost:
            how = "was lost: its host or its process went down without a word"
        elif self.halted:
            how = (
                f"was halted by signal {self.halted} ({signal_name(self.halted)}) and did not go on"
                " until it was ended"
            )
        elif self.signal:
            how = f"was killed by signal {self.signal} ({signal_name(self.signal)})"
        else:
            how = f"exited with code {self.code}"
        if self.peer:
            how += " because of another rank"
        elif self.signal == signal.SIGKILL and not self.halted:
            how += ", as the kernel does when memory runs out"
        return f"rank {self.rank} on host {self.host} {how}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


class Link:
    """One rank's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rank = -1  # not known before its hello
        self.host = "?"
        self.exit: Exit | None = None
        self.halted = 0  # the signal that has made its program stand still
        self._received = bytearray()

    def frames(self) -> Iterator[tuple[bytes, bytes]] | None:
        """The frames that one read completes; None when the other end has closed."""
        try:
            data = self.sock.recv(1 << 18)
        except OSError:
            data = b""
        self._received += data
        return self._complete() if data else None

    def _complete(self) -> Iterator[tuple[bytes, bytes]]:
        while frame := rank_process.take_frame(self._received):
            yield frame

    def greet(self, payload: bytes, token: str) -> bool:
        """Learn who is at the other end; False for somebody who does not know the token."""
        words = payload.decode(errors="replace").split(" ")
        if len(words) != 4 or not hmac.compare_digest(words[0].encode(), token.encode()):
            return False
        self.rank, self.host = int(words[1]), words[2]
        return True

    def note_exit(self, payload: bytes) -> Exit:
        how, number, stopped, *words = payload.decode().split()
        code, signal_number = (0, int(number)) if how == "signal" else (int(number), 0)
        self.exit = Exit(
            self.rank,
            self.host,
            code,
            signal_number,
            stopped=stopped == "1",
            began="init" in words,
            peer="peer" in words,
            halted=self.halted,
        )
        return self.exit

    def note_halt(self, payload: bytes) -> str:
        """What there is to say about it."""
        number, pid = map(int, payload.split())
        self.halted = number
        who = f"rank {self.rank} on host {self.host}"
        if not number:
            return f"{who} goes on"
        return (
            f"{who} was halted by signal {number} ({signal_name(number)}); `kill -CONT {pid}` there"
            " lets it go on"
        )

    def order(self, what: bytes) -> None:
        """Tell the rank to stop in one of the three ways; a link just broken needs no telling."""
        self.send(what, b"")

    def send(self, kind: bytes, payload: bytes) -> None:
        with contextlib.suppress(OSError):
            self.sock.sendall(rank_process.frame(kind, payload))


class Listener:
    """Where ranks report: a Unix socket for this host alone, TCP once other hosts take part.

    Neither leaves a file behind, however bagua-run ends. Anybody on the host may connect to either;
    the token is what makes a rank.
    """

    def __init__(self, remote: bool, interfaces: str) -> None:
        self.token = secrets.token_hex(16)
        if not remote and sys.platform == "linux":
            name = f"bagua-run-{secrets.token_hex(8)}"
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.bind(f"\0{name}")  # an abstract address: a name in the kernel, not a file
            self.sock.listen(1024)
            self.channel = f"unix:{name}"
        else:
            addresses = interface_addresses(interfaces) if remote else ["127.0.0.1"]
            self.sock = socket.create_server(("" if remote else addresses[0], 0), backlog=1024)
            port = self.sock.getsockname()[1]
            self.channel = f"tcp:{port}:" + ",".join(addresses)

    @property
    def variables(self) -> dict[str, str]:
        return {rank_process.CHANNEL: self.channel, rank_process.TOKEN: self.token}

    def close(self) -> None:
        self.sock.close()


def checked_interfaces(interfaces: str) -> list[str]:
    """The names in a list of network interfaces, each of which is here."""
    wanted = [name.strip() for name in interfaces.split(",") if name.strip()]
    present = [name for _, name in socket.if_nameindex()]
    for name in wanted:
        if name not in present:
            raise UsageError(
                f"--network-interfaces: no interface {name!r} here, only {', '.join(present)}"
                + nearest(name, present)
            )
    return wanted


def interface_addresses(interfaces: str) -> list[str]:
    """IPv4 addresses of the named interfaces, or of all but loopback when none is named."""
    wanted = checked_interfaces(interfaces)
    present = [name for _, name in socket.if_nameindex()]
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in wanted or [name for name in present if name != "lo"]:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            addresses.append(socket.inet_ntoa(answer[20:24]))
    if not addresses:
        raise UsageError(
            "no network interface"
            + (f" of {', '.join(wanted)}" if wanted else "")
            + " has an IPv4 address, so ranks on other hosts could not reach bagua-run;"
            " name one that has with --network-interfaces"
        )
    return addresses
