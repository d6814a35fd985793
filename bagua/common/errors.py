"""The three kinds of error: the caller can fix it, another rank failed or left, or we did."""

from __future__ import annotations


class BaguaError(RuntimeError):
    """Base of every error this project raises on purpose."""


class UsageError(BaguaError, ValueError):
    """The caller can fix it: a wrong argument, setting, shape, dtype or order of calls."""


class JoinedError(UsageError):
    """A rank has joined, and takes no part in an operation until all have."""


class PeerError(BaguaError):
    """Another rank failed or is late; the message names it."""


class LeftError(PeerError):
    """Another rank has shut down, and takes no part in an operation any more."""


class InternalError(BaguaError):
    """Our bug. Please report it together with the message."""
