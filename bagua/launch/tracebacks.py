"""Shows a traceback that several ranks print once: what matters is what is raised, and by whom."""

from __future__ import annotations

import time
from typing import Callable

# What was shown longer ago is hard to find again.
_REMEMBERED_S = 30.0
BEGIN = b"Traceback (most recent call last):"


class Tracebacks:
    """Those that have been shown lately, when, and on which rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown: dict[tuple[bytes, ...], tuple[float, int]] = {}

    def of(self, rank: int) -> Filter:
        return Filter(self, rank)

    def shorten(self, rank: int, frames: list[bytes]) -> list[bytes]:
        now = self._clock()
        self._shown = {
            key: (since, first)
            for key, (since, first) in self._shown.items()
            if since >= now - _REMEMBERED_S
        }
        _, first = self._shown.setdefault(tuple(frames), (now, rank))
        return frames if first == rank else [b"Traceback: the same as rank %d's" % first]


class Filter:
    """One stream of a rank, line by line; keeps frames back until it is clear what they end in."""

    def __init__(self, tracebacks: Tracebacks, rank: int) -> None:
        self._tracebacks, self._rank = tracebacks, rank
        self._frames: list[bytes] = []

    def pass_on(self, line: bytes) -> list[bytes]:
        """What is to be shown now."""
        if line == BEGIN:
            before, self._frames = self._frames, [line]
            return before
        if not self._frames:
            return [line]
        if line.startswith(b" "):
            self._frames.append(line)
            return []
        return [*self._tracebacks.shorten(self._rank, self.rest()), line]

    @property
    def holds(self) -> bool:
        return bool(self._frames)

    def rest(self) -> list[bytes]:
        """What is kept back."""
        frames, self._frames = self._frames, []
        return frames
