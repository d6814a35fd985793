"""Allreduce of sparse tensors, as they come from `nn.Embedding(sparse=True)`."""

from __future__ import annotations

from typing import Any

import torch

from bagua.common.handle import Handle
from bagua.common.kinds import Average, Kind, ReduceOp, Sum
from bagua.common.process_set import ProcessSet


def sparse_allreduce_async(
    ops: Any, tensor: Any, name: str | None, op: ReduceOp | None, process_set: ProcessSet
) -> Handle:
    """Gathers everyone's entries; equal indices are summed when the result is coalesced."""
    op = ops.checked_op(Kind.ALLGATHER, name, process_set, op)
    if op not in (Average, Sum):
        ops.refuse(Kind.ALLGATHER, name, process_set, f"op must be Average or Sum, not {op.name}")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        what = getattr(tensor, "layout", type(tensor).__name__)
        ops.refuse(Kind.ALLGATHER, name, process_set, f"a sparse COO tensor is needed, not {what}")
    tensor = tensor.detach()
    # The engine compares the shapes of rows, and those of the values have the dense dimensions. Of
    # each of the others no rows go along, and nobody has to look at what has come.
    extents = [
        tensor._values().new_empty((0, extent)) for extent in tensor.shape[: tensor.sparse_dim()]
    ]
    gathering = ops.grouped_allgather_async(
        [tensor._indices().t(), tensor._values(), *extents], name, process_set
    )

    gathered = gathering.finish

    def finish(done: Any) -> Any:
        indices, values, *_ = gathered(done)
        exact = not (values.is_floating_point() or values.is_complex())
        if op == Average and not exact:
            values = values / process_set.size()
        result = _sparse(indices.t(), values, tensor.shape)
        if op == Average and exact:  # of the sum, as of dense tensors
            result = result.coalesce()
            values = result.values().div(process_set.size(), rounding_mode="trunc")
            result = _sparse(result.indices(), values, tensor.shape)
        return result

    gathering.finish = finish
    return gathering


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: Any) -> torch.Tensor:
    """Of what ranks' own tensors had: torch, not told so, warns that it does not look at it."""
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
