"""The operations on NumPy arrays and DLPack exporters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bagua.common.arrays import NumpyArrays
from bagua.common.errors import UsageError
from bagua.common.operations import Operations
from bagua.common.world import world

_operations = Operations(NumpyArrays())


def empty_shared(shape: int | Sequence[int], dtype: Any = np.float32) -> Any:
    """An array whose exchanges with ranks of the same machine need no copy."""
    extents = [shape] if isinstance(shape, int) else list(shape)
    if min(extents, default=0) < 0:
        raise UsageError(f"empty_shared takes extents from 0 on, not {shape}")
    nbytes = math.prod(extents) * np.dtype(dtype).itemsize
    return np.frombuffer(world().engine.allocate(nbytes), dtype).reshape(extents)


allreduce = _operations.allreduce
allreduce_ = _operations.allreduce_
allreduce_async = _operations.allreduce_async
allreduce_async_ = _operations.allreduce_async_
grouped_allreduce = _operations.grouped_allreduce
grouped_allreduce_ = _operations.grouped_allreduce_
grouped_allreduce_async = _operations.grouped_allreduce_async
grouped_allreduce_async_ = _operations.grouped_allreduce_async_
allgather = _operations.allgather
allgather_async = _operations.allgather_async
grouped_allgather = _operations.grouped_allgather
grouped_allgather_async = _operations.grouped_allgather_async
allgather_with_rows = _operations.allgather_with_rows
broadcast = _operations.broadcast
broadcast_ = _operations.broadcast_
broadcast_async = _operations.broadcast_async
broadcast_async_ = _operations.broadcast_async_
grouped_broadcast_ = _operations.grouped_broadcast_
alltoall = _operations.alltoall
alltoall_async = _operations.alltoall_async
reducescatter = _operations.reducescatter
reducescatter_async = _operations.reducescatter_async
grouped_reducescatter = _operations.grouped_reducescatter
grouped_reducescatter_async = _operations.grouped_reducescatter_async
