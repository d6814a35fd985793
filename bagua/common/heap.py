"""Freed memory stays with the process.

glibc gives large tensors back to the system as soon as they are freed. A training step frees its
gradients and activations and allocates them again in the next one, and the system clears every page
anew: of a step of a 40 MB MLP on a CPU that was more than a quarter.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_MOST_NBYTES = 1 << 30
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> None:
    """Up to 1 GB of it from now on, unless the user has told glibc otherwise."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None and not any(name in os.environ for name in _OF_THE_USER):
        mallopt(_M_TRIM_THRESHOLD, _MOST_NBYTES)
        mallopt(_M_MMAP_THRESHOLD, _MOST_NBYTES)
