"""Bagua: one model trained by many processes, which exchange gradients while they compute.

The operations here work on NumPy arrays and anything that speaks DLPack; `bagua.torch` is the
PyTorch frontend. Names are loaded on first use, so that the launcher starts without MPI.
"""

from __future__ import annotations

import importlib
from typing import Any

from bagua.version import __version__

_HOME = {
    "bagua.common.world": (
        "init shutdown is_initialized rank size local_rank local_size cross_rank cross_size "
        "is_homogeneous mpi_threads_supported add_process_set remove_process_set barrier "
        "counters"
    ),
    "bagua.common.joined": "join",
    "bagua.common.objects": "broadcast_object broadcast_object_fn allgather_object",
    "bagua.common.process_set": "ProcessSet global_process_set",
    "bagua.common.handle": "Handle poll synchronize",
    "bagua.common.kinds": "ReduceOp Average Sum Adasum Min Max Product",
    "bagua.common.errors": "BaguaError UsageError PeerError LeftError InternalError",
    "bagua.common.numpy_ops": (
        "allreduce allreduce_ allreduce_async allreduce_async_ "
        "grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ "
        "allgather allgather_async grouped_allgather grouped_allgather_async "
        "broadcast broadcast_ broadcast_async broadcast_async_ grouped_broadcast_ "
        "alltoall alltoall_async "
        "reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async "
        "empty_shared"
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(
            f"module 'bagua' has no attribute {name!r}; what is for PyTorch is in bagua.torch: "
            "import bagua.torch as bagua"
        )
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
