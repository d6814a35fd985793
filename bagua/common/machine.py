"""The machine that a process is on, and its share of the cores."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path


def machine() -> str:
    """What shares its cores: containers have names of their own, but one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def usable_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_share(mine: frozenset[int], everyone: Sequence[frozenset[int]]) -> float:
    """Of each core that this rank may use, its share among the ranks that may.

    >>> core_share(frozenset({0, 1}), [frozenset({0, 1}), frozenset({1})])
    1.5
    >>> core_share(frozenset(range(6)), [frozenset(range(6))] * 6)  # a hair less would mean no core
    1.0
    """
    shares = (Fraction(1, sum(core in cores for cores in everyone)) for core in mine)
    return float(sum(shares))
