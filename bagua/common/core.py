"""Loads the C++ engine, after the MPI library it was built against."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI


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
        raise ImportError(
            f"bagua's engine cannot be loaded ({error}). mpi4py uses {loaded}; if the engine was "
            f"built against another MPI, {remedy}"
        ) from error
    compiled = str(_core.mpi_compiled())
    if _family(compiled) != _family(loaded):
        raise ImportError(f"bagua was built against {compiled}, but mpi4py uses {loaded}: {remedy}")
    return _core


core: Any = _load()
