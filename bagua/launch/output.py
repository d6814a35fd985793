"""Puts the output of all ranks on one terminal or into one log, line by line and prefixed by rank.

A *line* ends in a newline. What has not ended yet is *live*: a progress bar that rewrites itself by
carriage returns, or a prompt. One live line at a time stands on a screen, its owner's the lowest
rank; whole lines of others go above it. Where the screen is no terminal the carriage returns
are kept and a whole line of somebody else ends the live one.
"""

from __future__ import annotations

import collections
import os
import re
import select
import shutil
import time
from dataclasses import dataclass, field
from typing import BinaryIO, Callable

from bagua.common.errors import UsageError
from bagua.launch.tracebacks import BEGIN, Filter, Tracebacks

TAIL_LINES = 30
IN_SIGHT_LINES = 15  # that others have said since
STDOUT, STDERR = "stdout", "stderr"
MPIRUN = -1  # the "rank" of what mpirun itself says

# An unfinished line without a carriage return waits so long for its end: on a terminal somebody
# looks at a prompt; elsewhere it would stand there twice if another rank's line comes between.
_LIVE_AFTER_S, _LIVE_IN_LOG_AFTER_S = 0.05, 1.0
_LONGEST_LINE = 1 << 20
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_ERASE = b"\r\x1b[K"


class Screen:
    """One place that bytes go to, with at most one live line on it."""

    def __init__(self, fd: int, is_tty: bool, colour: bool) -> None:
        self.colour = colour
        self._fd = fd
        self.is_tty = is_tty
        self.line_count = 0
        self._owner: Stream | None = None
        self._shown = b""

    def line(self, stream: Stream, text: bytes) -> None:
        """A whole line, above a live one of somebody else."""
        self.line_count += 1
        stream.last_line = self.line_count
        if self._owner is stream:
            self._write(self._rewritten(stream, text) + b"\n")
            self._owner = None
        elif self._owner is None:
            self._write(stream.prefix() + text + b"\n")
        elif self.is_tty:
            again = self._owner.prefix() + self._shown
            self._write(_ERASE + stream.prefix() + text + b"\n" + again)
        else:
            self._owner = None
            self._write(b"\n" + stream.prefix() + text + b"\n")

    def live(self, stream: Stream, text: bytes) -> None:
        """Show a line that may still change, unless a lower rank's has the place."""
        owner = self._owner
        if owner is not None and owner is not stream and owner.rank <= stream.rank:
            return
        if owner is stream:
            self._write(self._rewritten(stream, text))
        else:
            clear = b"" if owner is None else _ERASE if self.is_tty else b"\n"
            self._write(clear + stream.prefix() + text)
        self._owner, self._shown = stream, text

    def _rewritten(self, stream: Stream, text: bytes) -> bytes:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return (_ERASE if self.is_tty else b"\r") + stream.prefix() + text

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                select.select([], [self._fd], [])


@dataclass(eq=False)
class Stream:
    """Standard output or error of one rank: splits it into whole and live lines."""

    rank: int
    screen: Screen
    prefix: Callable[[], bytes]
    on_line: Callable[[Stream, bytes], None]
    copy: BinaryIO | None = None
    tracebacks: Filter = field(default_factory=lambda: Tracebacks().of(MPIRUN))
    last_line: int = 0  # on the screen
    _pending: bytes = field(default=b"", repr=False)
    _since: float = 0.0

    def feed(self, data: bytes) -> None:
        if self.copy is not None:
            self.copy.write(data)
            self.copy.flush()
        if not self._pending:
            self._since = time.monotonic()
        *lines, rest = (self._pending + data).split(b"\n")
        for line in lines:
            self._end_line(line)
        if lines:
            self._since = time.monotonic()
        self._pending = _last_version(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if len(rest) > _LONGEST_LINE:
            self.end()
        elif b"\r" in rest:
            self.screen.live(self, _last_version(rest))

    def show_waiting(self) -> bool:
        """Show what is unfinished and has waited long enough; True while something still waits."""
        if not self._pending and not self.tracebacks.holds:
            return False
        patience_s = _LIVE_AFTER_S if self.screen.is_tty else _LIVE_IN_LOG_AFTER_S
        if time.monotonic() - self._since < patience_s:
            return True
        self._show_held()
        if self._pending:
            self.screen.live(self, _last_version(self._pending))
        return False

    def end(self) -> None:
        """What is unfinished becomes a line."""
        if self._pending:
            self._end_line(self._pending)
            self._pending = b""
        self._show_held()

    def close(self) -> None:
        """Nothing more comes, perhaps since mpirun ended this rank when another had failed."""
        is_cut = self.tracebacks.holds and self._pending[:1] in (b"", b" ")
        self.end()
        if is_cut:
            self.screen.line(self, b"  (ended before it had said what was raised)")
        if self.copy is not None:
            self.copy.close()
            self.copy = None

    def _end_line(self, line: bytes) -> None:
        text = _last_version(line)
        for shown in self.tracebacks.pass_on(text):
            self.screen.line(self, shown)
        self.on_line(self, text)

    def _show_held(self) -> None:
        for shown in self.tracebacks.rest():
            self.screen.line(self, shown)


def _last_version(line: bytes) -> bytes:
    """What a terminal shows of a line rewritten by carriage returns."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


class Output:
    """The streams of all ranks and of mpirun, and the last lines of each rank."""

    def __init__(
        self,
        rank_count: int,
        screens: dict[str, Screen],
        *,
        timestamp: bool = False,
        folder: str = "",
    ) -> None:
        self._width = len(str(rank_count - 1)) + 2
        self._screens = screens
        self._timestamp = timestamp
        self._folder = folder
        self._streams: dict[tuple[int, str], Stream] = {}
        self._tails: dict[int, collections.deque[bytes]] = {}
        self._spoke_last: dict[int, Stream] = {}  # by rank, which of its streams
        self._tracebacks = Tracebacks()
        if folder:
            _prepare(folder, rank_count)

    def feed(self, rank: int, name: str, data: bytes) -> None:
        self._stream(rank, name).feed(data)

    def show_waiting(self) -> bool:
        """Show lines left unfinished for a moment; True while any has still to wait."""
        return sum(stream.show_waiting() for stream in self._streams.values()) > 0

    def end(self) -> None:
        """End every unfinished line and close the copies."""
        for stream in self._streams.values():
            stream.close()

    def show_tail(self, rank: int) -> None:
        """The last lines of a rank once more, unless they are in sight at the end.

        Where others have said since what it ends with, too, as of an error that all ranks have.
        """
        tail = self._tails.get(rank)
        screen = self._screens[STDERR]
        if tail is None or self._is_in_sight(rank, screen):
            return
        say(screen, f"bagua-run: the last output of rank {rank}:")
        stream = Stream(rank, screen, self._prefix(rank, screen), lambda *_: None)
        for text in tail:
            stream.feed(text + b"\n")
        stream.end()

    def _is_in_sight(self, rank: int, screen: Screen) -> bool:
        last = self._spoke_last[rank]
        if last.screen is not screen or screen.line_count - last.last_line > IN_SIGHT_LINES:
            return False
        since = (s.rank for s in self._streams.values() if s.last_line > last.last_line)
        return all(self._ending(other) == self._ending(rank) for other in since)

    def _ending(self, rank: int) -> list[bytes]:
        """The last traceback, and what has been said after it."""
        tail = list(self._tails[rank])
        return tail[max((i for i, line in enumerate(tail) if line == BEGIN), default=0) :]

    def _stream(self, rank: int, name: str) -> Stream:
        if (rank, name) not in self._streams:
            screen = self._screens[name]
            self._streams[rank, name] = Stream(
                rank,
                screen,
                self._prefix(rank, screen),
                self._note_line,
                self._open_copy(rank, name),
                self._tracebacks.of(rank),
            )
        return self._streams[rank, name]

    def _note_line(self, stream: Stream, text: bytes) -> None:
        self._tails.setdefault(stream.rank, collections.deque(maxlen=TAIL_LINES)).append(text)
        self._spoke_last[stream.rank] = stream

    def _open_copy(self, rank: int, name: str) -> BinaryIO | None:
        if not self._folder or rank == MPIRUN:
            return None
        return open(os.path.join(self._folder, f"rank.{rank}", name), "wb")

    def _prefix(self, rank: int, screen: Screen) -> Callable[[], bytes]:
        mark = "[mpirun]" if rank == MPIRUN else f"[{rank}]".ljust(self._width)
        if screen.colour:
            mark = f"\x1b[{_COLOURS[rank % len(_COLOURS)] if rank != MPIRUN else 2}m{mark}\x1b[0m"
        if not self._timestamp:
            return lambda: f"{mark} ".encode()
        return lambda: f"{_now()} {mark} ".encode()


def _prepare(folder: str, rank_count: int) -> None:
    """Empty files for every rank of this run, and none of an earlier, larger one."""
    with os.scandir(folder) as entries:
        for entry in list(entries):
            number = re.fullmatch(r"rank\.(0|[1-9]\d*)", entry.name)
            if number and int(number[1]) >= rank_count and _is_ours(entry):
                shutil.rmtree(entry.path)
    for rank in range(rank_count):
        own = os.path.join(folder, f"rank.{rank}")
        os.makedirs(own, exist_ok=True)
        for name in (STDOUT, STDERR):
            open(os.path.join(own, name), "wb").close()


def _is_ours(folder: os.DirEntry[str]) -> bool:
    """Whether a folder holds what `Output` writes and nothing else."""
    if not folder.is_dir(follow_symlinks=False):
        return False
    with os.scandir(folder.path) as entries:
        files = {e.name: e.is_file(follow_symlinks=False) for e in entries}
    return bool(files) and files.keys() <= {STDOUT, STDERR} and all(files.values())


def say(screen: Screen, text: str) -> None:
    """A line of bagua-run's own."""
    screen.line(Stream(MPIRUN, screen, lambda: b"", lambda *_: None), text.encode())


def standard_screens() -> dict[str, Screen]:
    """The screens of this process; standard output and error share one where they are one place."""
    try:
        out, err = os.fstat(1), os.fstat(2)
    except OSError:
        raise UsageError(
            "standard output or standard error is closed; to see none of it: > /dev/null"
        ) from None
    first = _screen_of(1)
    same = (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)
    return {STDOUT: first, STDERR: first if same else _screen_of(2)}


def _screen_of(fd: int) -> Screen:
    is_tty = os.isatty(fd)
    return Screen(fd, is_tty, colour=is_tty and "NO_COLOR" not in os.environ)


def _now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
