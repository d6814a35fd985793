"""Nested containers from one rank to the others, whose tensors travel as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.common.objects import broadcast_object
from bagua.common.process_set import ProcessSet
from bagua.common.world import rank
from bagua.torch import ops


def broadcast_nested(
    value: Any,
    root_rank: int,
    gpu: torch.device | None,
    process_set: ProcessSet,
    name: str | None = None,
) -> Any:
    """The root's on every rank, and on the root itself; `gpu` is where this rank has its tensors
    if the root's are on one."""
    tensors: list[torch.Tensor] = []
    is_root = rank() == root_rank
    skeleton = _without_tensors(value, tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank, name, process_set)
    if not is_root:
        skeleton = _with_empty_tensors(skeleton, tensors, gpu)
    broadcast_all(tensors, root_rank, process_set, name)
    return value if is_root else skeleton


def broadcast_all(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    process_set: ProcessSet,
    name: str | None = None,
) -> None:
    # Those on a GPU apart, so that they can stay there: all ranks have the same ones on GPUs.
    for is_cpu, where in ((True, "cpu"), (False, "gpu")):
        if alike := [tensor for tensor in tensors if tensor.is_cpu == is_cpu]:
            of = name and f"{name}.{where}"
            ops.grouped_broadcast_(alike, root_rank, name=of, process_set=process_set)


class _Placeholder:
    """Stands for a tensor in what is pickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.is_cpu = tensor.is_cpu


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of nested containers with placeholders for the tensors, which go to the list."""

    def replace(tensor: torch.Tensor) -> Any:
        tensors.append(tensor.detach())
        return _Placeholder(tensor)

    return _mapped(value, torch.Tensor, replace)


def _with_empty_tensors(value: Any, tensors: list[torch.Tensor], gpu: torch.device | None) -> Any:
    """The reverse, with new tensors to be filled."""

    def replace(placeholder: _Placeholder) -> Any:
        if gpu is None and not placeholder.is_cpu:
            raise UsageError(
                "the root's optimizer has state on a GPU, and this rank's has its parameters on "
                "the CPU"
            )
        device = "cpu" if placeholder.is_cpu else gpu
        tensors.append(torch.empty(placeholder.shape, dtype=placeholder.dtype, device=device))
        return tensors[-1]

    return _mapped(value, _Placeholder, replace)


def _mapped(value: Any, kind: type, replace: Any) -> Any:
    """A copy of nested containers in which every object of a kind is replaced."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {key: _mapped(item, kind, replace) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, kind, replace) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, kind, replace) for item in value)
    return value
