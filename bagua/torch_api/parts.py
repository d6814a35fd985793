"""Tensors as rows of elements, whatever their shapes, and equal or given parts of them."""

from __future__ import annotations

import torch

from bagua.common.errors import UsageError
from bagua.common.process_set import ProcessSet


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def part(tensor: torch.Tensor, begin: int, count: int, exactly: bool = False) -> torch.Tensor:
    """So many elements from one on; `exactly`: they are all there are."""
    if begin + count > tensor.numel() or (exactly and count != tensor.numel()):
        raise UsageError(
            f"elements {begin} to {begin + count} of a tensor of {tensor.numel()} are asked for"
        )
    return flat(tensor)[begin : begin + count]


def share(tensor: torch.Tensor, ranks: ProcessSet) -> int:
    count, rest = divmod(tensor.numel(), ranks.size())
    if rest:
        raise UsageError(
            f"{tensor.numel()} elements are not {ranks.size()} equal parts, one for each rank"
        )
    return count


def put(target: torch.Tensor, values: torch.Tensor) -> None:
    """Writes all of a tensor, whatever its shape."""
    if (target.numel(), target.dtype) != (values.numel(), values.dtype):
        raise UsageError(
            f"the result is {values.numel()} elements of {values.dtype}, the tensor for it has "
            f"{target.numel()} of {target.dtype}"
        )
    target.detach().copy_(values.view(target.shape))


def put_at(target: torch.Tensor, begin: int, values: torch.Tensor) -> None:
    """Writes some elements from one on; the others stay."""
    elements = flat(target)  # a copy, if the target has gaps
    if begin + len(values) > len(elements) or target.dtype != values.dtype:
        raise UsageError(
            f"{len(values)} elements of {values.dtype} from {begin} on are no part of a tensor of "
            f"{len(elements)} of {target.dtype}"
        )
    elements[begin : begin + len(values)] = values
    if not target.is_contiguous():
        target.detach().copy_(elements.view(target.shape))


def needed(tensor: torch.Tensor | None, name: str, rank: int) -> torch.Tensor:
    if tensor is None:
        raise UsageError(f"{name} is needed on rank {rank}")
    return tensor
