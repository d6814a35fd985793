"""The PyTorch frontend. `import bagua.torch as hvd` runs what was written for Horovod."""

from __future__ import annotations

from typing import Any as _Any

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "bagua.torch needs PyTorch: pip install 'bagua[torch]'; "
        "`import bagua` alone works on NumPy arrays"
    ) from error

from bagua.common.handle import Handle
from bagua.common.kinds import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.common.world import (
    add_process_set,
    barrier,
    counters,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_threads_supported,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from bagua.torch import exceptions
from bagua.torch.absent import absent as _absent
from bagua.torch.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    nccl_built,
    rocm_built,
)
from bagua.torch.compression import Compression, Compressor
from bagua.torch.exceptions import (
    BaguaError,
    HorovodInternalError,
    InternalError,
    LeftError,
    PeerError,
    UsageError,
)
from bagua.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
    empty_shared,
)
from bagua.torch.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_broadcast_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from bagua.torch.optimizer import DistributedOptimizer, no_sync
from bagua.torch.qadam import QAdam
from bagua.torch.safety import ReplicasDifferError
from bagua.torch.sync_batch_norm import SyncBatchNorm
from bagua.version import __version__

__all__ = [
    "Adasum",
    "Average",
    "BaguaError",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "InternalError",
    "LeftError",
    "Max",
    "Min",
    "PeerError",
    "ProcessSet",
    "Product",
    "QAdam",
    "ReduceOp",
    "ReplicasDifferError",
    "Sum",
    "SyncBatchNorm",
    "UsageError",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "counters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "empty_shared",
    "exceptions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_broadcast_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "no_sync",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]


def __getattr__(name: str) -> _Any:
    """Only for what is missing."""
    raise _absent(__name__, name)
