"""Tensors that are each rank's own: others have no replica of them, so nothing of them travels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_MARK = "bagua_own"  # of a tensor's attribute
_SHARED_LOSS = "bagua_own_of_mean"  # likewise
_marked: Any = WeakTensorKeyDictionary()  # those that are alive


def keep_own(tensors: Iterable[torch.Tensor], of_mean: bool = False) -> None:
    """From now on `broadcast_parameters`, `broadcast_optimizer_state` and every optimizer that is
    made distributed leave these parameters and buffers, and their state, as they are on each rank.

    The mark is on the tensor itself. `OwnMemory` knows what `state_dict()` gives for it, too, but
    what `clone()` or `copy.deepcopy` make of it is another tensor without a mark. `of_mean`: their
    gradients are those of the mean of all ranks' losses, and not of this rank's alone.
    """
    for tensor in tensors:
        setattr(tensor, _MARK, True)
        setattr(tensor, _SHARED_LOSS, of_mean)
        _marked[tensor] = True


def is_own(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, _MARK, False))


def is_own_of_mean(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, _SHARED_LOSS, False))


class OwnMemory:
    """Where tensors that are marked have their values now: `state_dict()` gives others, without
    the mark, that look at the same memory."""

    def __init__(self) -> None:
        # They are alive, so that nothing else has got their memory; `.data` may have moved.
        self._places = {_place(tensor) for tensor in list(_marked.keys())} - {None}

    def has(self, tensor: torch.Tensor) -> bool:
        return is_own(tensor) or _place(tensor) in self._places


def _place(tensor: torch.Tensor) -> Any:
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.is_meta:
        return None
    return tensor.device, tensor.data_ptr(), tensor.nbytes
