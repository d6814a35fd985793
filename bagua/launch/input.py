"""bagua-run's standard input on its way to rank 0."""

from __future__ import annotations

import os
import selectors
import sys

from bagua.launch.channel import Link

_PIECE = 1 << 15  # fits into the link's buffers, so that sending never waits
_STDIN = 0


class Input:
    """Reads a piece whenever rank 0 asks for one, so nothing is read that nobody wants.

    mpirun could forward it, but Open MPI 5 forwards no end of it. A terminal is not read: it stays
    with the shell, and its end would never come.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._link: Link | None = None

    def asked(self, link: Link) -> None:
        """Rank 0 wants a piece: it gets one once there is one."""
        self._link = link
        if sys.stdin is None or os.isatty(_STDIN):
            link.send(b"S", b"")
            return
        try:
            self._selector.register(_STDIN, selectors.EVENT_READ, self._readable)
        except PermissionError:  # a regular file or /dev/null, where reading never waits
            self._pass_on()

    def _readable(self, _: object) -> None:
        self._selector.unregister(_STDIN)
        self._pass_on()

    def _pass_on(self) -> None:
        assert self._link is not None
        try:
            data = os.read(_STDIN, _PIECE)
        except BlockingIOError:  # somebody who shares it was faster
            self.asked(self._link)
            return
        except OSError:
            data = b""
        self._link.send(b"S", data)
