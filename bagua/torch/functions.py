"""Same start for all: parameters, optimizer state and objects from one rank to the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Union

import torch

from bagua.common.errors import UsageError
from bagua.common.objects import allgather_object, broadcast_object, broadcast_object_fn
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.common.world import rank, world
from bagua.torch.checks import check_alike
from bagua.torch.nested import broadcast_all, broadcast_nested
from bagua.torch.optimizer import DistributedOptimizer
from bagua.torch.own import OwnMemory, is_own

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "empty_shared",
]


def empty_shared(*shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose exchanges with ranks of the same machine need no copy.

    Takes a shape as `torch.empty` does. Its memory, whose pages count when they are first written
    to, lives as long as the tensor or a view of it.
    """
    if not isinstance(dtype, torch.dtype) or any(isinstance(n, torch.dtype) for n in shape):
        raise UsageError("empty_shared takes a shape and dtype=, a torch.dtype such as torch.half")
    extents = torch.empty(*shape, device="meta").shape  # takes all that torch.empty takes
    count = extents.numel()
    if count == 0:
        return torch.empty(extents, dtype=dtype)
    memory = world().engine.allocate(count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype)[:count].view(extents)


Parameters = Union[Mapping[str, Any], Iterable[tuple[str, Any]]]


def broadcast_parameters(
    params: Parameters, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Copies the root's tensors into everyone's, in place.

    `params` is `model.state_dict()` or `model.named_parameters()`: the same names on all ranks, in
    any order. Left alone are what is no tensor and, in both forms, experts and what else each rank
    has for its own. They are known by their memory: copies of them, as by `clone()`, are broadcast
    like everything else.
    """
    if isinstance(params, torch.nn.Module):
        raise UsageError("broadcast_parameters takes model.state_dict(), not the model")
    items = params.items() if isinstance(params, Mapping) else params
    if not isinstance(items, Iterable):
        raise UsageError(f"broadcast_parameters takes model.state_dict(), not {params!r}")
    own = OwnMemory()
    tensors: list[tuple[str, torch.Tensor]] = []
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            raise UsageError(
                "broadcast_parameters needs state_dict() or named_parameters(), "
                f"not an iterable of {type(item).__name__}"
            )
        name, tensor = item
        if isinstance(tensor, torch.Tensor) and not own.has(tensor):
            tensors.append((str(name), tensor))
    tensors.sort(key=lambda pair: pair[0])  # ranks may differ in their order
    distinct: dict[Any, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        distinct.setdefault(_memory_of(tensor), (name, tensor))
    named = list(distinct.values())
    check_alike(named, process_set)
    broadcast_all([tensor for _, tensor in named], root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the root's optimizer state and hyperparameters.

    The others need not have any state yet. What an algorithm keeps, as the errors of a codec, is
    each rank's own and stays, unless a rank has loaded some that does not fit that of the others.
    `model` is there for Horovod's sake and not needed.
    """
    if not hasattr(optimizer, "param_groups"):
        what = type(optimizer).__name__
        raise UsageError(f"broadcast_optimizer_state takes the optimizer, not a {what}")
    if isinstance(optimizer, DistributedOptimizer):
        # What an algorithm keeps is each rank's own; how far it has come is not.
        progress = broadcast_object(optimizer.progress, root_rank, process_set=process_set)
        due = any(allgather_object(optimizer.state_due, process_set=process_set))
        optimizer.go_to(progress, due)
        optimizer = optimizer.inner
    _check_same_groups(optimizer, process_set)
    is_root = rank() == root_rank
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = [index for index, param in enumerate(params) if is_own(param)]
    shared = optimizer.state_dict() if is_root else {}
    if is_root and own:
        state = {index: each for index, each in shared["state"].items() if index not in own}
        shared = {**shared, "state": state}
    shared = broadcast_nested(shared, root_rank, _gpu_of(optimizer), process_set)
    if not is_root:
        kept = {params[index]: optimizer.state.get(params[index]) for index in own}
        optimizer.load_state_dict(shared)
        _keep_dtypes(optimizer, shared)
        optimizer.state.update({param: state for param, state in kept.items() if state})


def _memory_of(tensor: torch.Tensor) -> Any:
    """Equal for tied parameters, which need to travel only once."""
    if tensor.numel() == 0 or not tensor.is_cpu:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _check_same_groups(optimizer: torch.optim.Optimizer, process_set: ProcessSet) -> None:
    mine = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    everyone = allgather_object(mine, process_set=process_set)
    for other, theirs in zip(process_set.ranks, everyone):
        if theirs != everyone[0]:
            raise UsageError(
                "broadcast_optimizer_state: the optimizers have different parameters: "
                f"{everyone[0]} on rank {process_set.ranks[0]}, {theirs} on rank {other}"
            )


def _gpu_of(optimizer: torch.optim.Optimizer) -> torch.device | None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return next((param.device for param in params if param.is_cuda), None)


def _keep_dtypes(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """Undoes that load_state_dict casts state to the parameters' element type.

    Ranks with bfloat16 parameters would otherwise go on with rounded moments, and the root not.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        loaded = optimizer.state.get(param, {})
        for key, value in state_dict.get("state", {}).get(index, {}).items():
            here = loaded.get(key)
            both = isinstance(value, torch.Tensor) and isinstance(here, torch.Tensor)
            if both and here.dtype != value.dtype:
                loaded[key] = value
