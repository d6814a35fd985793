"""Freed memory stays with the process.

A training step frees its gradients and activations and allocates them again in the next one. glibc
gives the end of its heap back to the system meanwhile, which clears every page anew.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
# Larger blocks go back at once. As far as glibc goes by itself, and before 2.35 at all.
_LARGEST_NBYTES = 32 << 20
_MOST_NBYTES = 1 << 30


def keep_freed() -> None:
    """So much at the end of the heap; what lies below something in use stays anyway."""
    _set(_MOST_NBYTES)


def give_back_freed() -> None:
    """What there is, and from now on as glibc does by itself."""
    _set(2 * _LARGEST_NBYTES)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(most_nbytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGEST_NBYTES):
        mallopt(_M_TRIM_THRESHOLD, most_nbytes)
