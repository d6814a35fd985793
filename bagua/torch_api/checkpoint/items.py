"""What a checkpoint is made of: weights and optimizer states, one by one, under keys."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.torch.kept import KEY
from bagua.torch_api.model_parallel.moe.experts import is_moe_param
from bagua.torch_api.own_tensors import mark_own

# ("weight", name), ("state", number of the optimizer, index of the parameter),
# ("groups", number of the optimizer), ("kept", number of the optimizer) and SCHEDULER.
Key = tuple[Any, ...]
Items = dict[Key, Any]
Optimizers = Sequence[torch.optim.Optimizer]

SCHEDULER: Key = ("lr_scheduler",)


def items_of(
    model: torch.nn.Module, optimizers: Optimizers, lr_scheduler: Any
) -> tuple[Items, set[Key]]:
    """Everything there is, and the keys of what no other rank has anything like.

    Those are experts and what algorithms keep. What is each rank's own since a list says so, others
    could begin with.
    """
    mark_own(model)
    named: list[tuple[str, torch.Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    named += model.named_buffers(remove_duplicate=False)
    own: set[Key] = {("weight", name) for name, tensor in named if is_moe_param(tensor)}
    items: Items = {("weight", name): value for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        state = dict(optimizer.state_dict())
        kept = state.pop(KEY, None)
        for index, entry in state.pop("state", {}).items():
            items["state", number, index] = entry
        items["groups", number] = state
        if kept is not None:  # by an algorithm, from step to step
            items["kept", number] = kept
            own.add(("kept", number))
        params = [param for group in optimizer.param_groups for param in group["params"]]
        own |= {
            ("state", number, index) for index, param in enumerate(params) if is_moe_param(param)
        }
    if lr_scheduler is not None:
        items[SCHEDULER] = lr_scheduler.state_dict()
    return items, own & set(items)


def take_up(
    items: Items,
    model: torch.nn.Module,
    optimizers: Optimizers,
    lr_scheduler: Any,
    strict: bool,
) -> None:
    """The reverse."""
    if lr_scheduler is not None and SCHEDULER not in items:
        raise UsageError("the checkpoint was saved without an lr_scheduler")
    saved = sum(key[0] == "groups" for key in items)
    if optimizers and len(optimizers) != saved:
        raise UsageError(f"the checkpoint has {saved} optimizers, here are {len(optimizers)}")
    weights = {key[1]: value for key, value in items.items() if key[0] == "weight"}
    model.load_state_dict(weights, strict=strict)
    for number, optimizer in enumerate(optimizers):
        state = dict(items["groups", number])
        state["state"] = {
            key[2]: entry for key, entry in items.items() if key[:2] == ("state", number)
        }
        if ("kept", number) in items:
            state[KEY] = items["kept", number]
        optimizer.load_state_dict(state)
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(items[SCHEDULER])


def digest(value: Any) -> bytes:
    """Equal for equal bits."""
    found = hashlib.blake2b(digest_size=16)
    _feed(value, found)
    return found.digest()


def _feed(value: Any, found: Any) -> None:
    """Each piece begins with its type and length, so that none can be taken for another."""
    if isinstance(value, torch.Tensor):
        _feed_piece(value, repr((value.dtype, tuple(value.shape))).encode(), found)
        flat = value.detach().cpu().contiguous().flatten()
        _feed_piece(value, flat.view(torch.uint8).numpy().data, found)
    elif isinstance(value, dict):
        _feed_piece(value, repr(len(value)).encode(), found)
        for key, item in value.items():
            _feed(key, found)
            _feed(item, found)
    elif isinstance(value, (list, tuple)):
        _feed_piece(value, repr(len(value)).encode(), found)
        for item in value:
            _feed(item, found)
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        _feed_piece(value, repr(value).encode(), found)
    else:  # their repr may leave something out
        _feed_piece(value, pickle.dumps(value), found)


def _feed_piece(value: Any, content: Any, found: Any) -> None:
    found.update(f"{type(value).__name__} {len(content)} ".encode())
    found.update(content)
