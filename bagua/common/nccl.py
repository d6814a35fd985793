"""Which NCCL there is, and where, if it came as a wheel."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# A GPU among several ranks, if it is told to; csrc/engine/nccl_exchange.cc has it, too.
FIRST_THAT_SHARES = (2, 30)


def library_path() -> str:
    """The library of nvidia-nccl-cu12 or -cu13, which need not be on any search path."""
    try:
        wheel = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package of NVIDIA's at all
        return ""
    folders = (wheel and wheel.submodule_search_locations) or []
    found = [file for folder in folders for file in Path(folder).glob("lib/libnccl.so.2")]
    return str(found[0]) if found else ""


def nccl_version() -> tuple[int, ...]:
    """Of the one that would be used; nothing without any."""
    from bagua.common.core import core  # loads MPI, which a launcher does without

    text = core.nccl_found(library_path())
    return () if text.startswith("no NCCL") else tuple(map(int, text.split(".")))
