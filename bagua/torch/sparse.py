"""Allreduce of sparse tensors, as they come from `nn.Embedding(sparse=True)`."""

from __future__ import annotations

from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.common.handle import Handle
from bagua.common.kinds import Average, Kind, ReduceOp, Sum
from bagua.common.process_set import ProcessSet


def sparse_allreduce_async(
    ops: Any, tensor: Any, name: str | None, op: ReduceOp | None, process_set: ProcessSet
) -> Handle:
    """Gathers everyone's entries; equal indices are summed when the result is coalesced."""
    op = Average if op is None else ReduceOp(op)
    if op not in (Average, Sum):
        ops._refuse(Kind.ALLGATHER, name, process_set, f"op must be Average or Sum, not {op.name}")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        what = getattr(tensor, "layout", type(tensor).__name__)
        ops._refuse(Kind.ALLGATHER, name, process_set, f"a sparse COO tensor is needed, not {what}")
    tensor = tensor.detach()
    # The engine compares what is exchanged, so the dense shape goes along as a row of its own.
    shape = torch.tensor([[tensor.sparse_dim(), *tensor.shape]], device=tensor.device)
    gathering = ops.grouped_allgather_async(
        [tensor._indices().t(), tensor._values(), shape], name, process_set
    )

    gathered = gathering.finish

    def finish(done: Any) -> Any:
        indices, values, shapes = gathered(done)
        if (shapes != shape).any():
            raise UsageError(
                f"sparse_allreduce {name or ''}: shapes differ between the ranks "
                f"{process_set.ranks}: {shapes[:, 1:].tolist()}"
            )
        if op == Average:
            rounding = None if values.is_floating_point() or values.is_complex() else "trunc"
            values = values.div(process_set.size(), rounding_mode=rounding)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape)

    gathering.finish = finish
    return gathering
