"""Errors under the name that Horovod's users catch."""

from __future__ import annotations

from bagua.common.errors import BaguaError, InternalError, LeftError, PeerError, UsageError

# Whatever an exchange can raise: a mismatch between ranks, a rank that failed, our own bug.
HorovodInternalError = BaguaError

__all__ = [
    "BaguaError",
    "HorovodInternalError",
    "InternalError",
    "LeftError",
    "PeerError",
    "UsageError",
]
