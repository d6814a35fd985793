"""Tensors as rows of elements, whatever their shapes, and equal or given parts of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.common.process_set import ProcessSet


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def part(tensor: torch.Tensor, begin: int, count: int, exactly: bool = False) -> torch.Tensor:
    """So many elements from one on; `exactly`: they are all there are."""
    _check_part(tensor.numel(), begin, count)
    if exactly and count != tensor.numel():
        raise UsageError(f"{count} elements are asked for, the tensor has {tensor.numel()}")
    return flat(tensor)[begin : begin + count]


def places(
    tensor: torch.Tensor, counts: Sequence[Any], displs: Sequence[Any], ranks: ProcessSet, what: str
) -> list[tuple[int, int]]:
    """For each rank where its part of the tensor begins, and how many elements it has."""
    nranks = ranks.size()
    if len(counts) != nranks or len(displs) != nranks:
        raise UsageError(
            f"{what}_counts and {what}_displs have one number for each of {nranks} ranks, not "
            f"{len(counts)} and {len(displs)}"
        )
    try:
        pairs = [(operator.index(begin), operator.index(n)) for begin, n in zip(displs, counts)]
    except TypeError as problem:
        raise UsageError(f"{what}_counts and {what}_displs are whole numbers: {problem}") from None
    for begin, count in pairs:
        _check_part(tensor.numel(), begin, count)
    return pairs


def _check_part(have: int, begin: int, count: int) -> None:
    if begin < 0 or count < 0 or begin + count > have:
        raise UsageError(f"{count} elements from {begin} on are no part of a tensor of {have}")


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
