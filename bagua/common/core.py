"""Loads the C++ engine, after the MPI library it was built against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bagua.common.mpi import MPI


def _family(version: str) -> str:
    """The implementation a version text speaks of; Intel MPI and MVAPICH share MPICH's ABI."""
    return "Open MPI" if version.startswith("Open MPI") else "MPICH"


def _load() -> Any:
    loaded = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
    remedy = (
        "install the wheel of the other MPI beside mpi4py, or rebuild with "
        "MPICXX=/path/to/its/mpicxx pip install --no-cache-dir --force-reinstall bagua"
    )
    try:
        from bagua import _core
    except ImportError as error:
        source = Path(__file__).parents[2]
        if (source / "csrc").is_dir() and not list((source / "bagua").glob("_core*")):
            raise ImportError(
                f"this is Bagua's source tree in {source}, which hides an installed Bagua and has "
                "no engine of its own: start Python in another folder, or build the engine here by "
                "`make dev` and use .venv/bin/python"
            ) from error
        raise ImportError(
            f"bagua's engine cannot be loaded ({error}). mpi4py uses {loaded}; if the engine was "
            f"built against another MPI, {remedy}"
        ) from error
    compiled = str(_core.mpi_compiled())
    if _family(compiled) != _family(loaded):
        raise ImportError(f"bagua was built against {compiled}, but mpi4py uses {loaded}: {remedy}")
    return _core


core: Any = _load()
