"""What this build of the engine can do, under the names that Horovod's users ask for."""

from __future__ import annotations

from bagua.common.core import core


def mpi_built() -> bool:
    return "mpi" in core.build_info()["transports"]


def mpi_enabled() -> bool:
    """Whether MPI is used here: it always is."""
    return mpi_built()


def cuda_built() -> bool:
    return bool(core.build_info()["cuda"] != "not built")


def nccl_built() -> bool:
    return bool(core.build_info()["nccl"] != "not built")


def gloo_built() -> bool:
    return False


def gloo_enabled() -> bool:
    return False


def ccl_built() -> bool:
    return False


def ddl_built() -> bool:
    return False


def rocm_built() -> bool:
    return False
