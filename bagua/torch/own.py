"""Tensors that are each rank's own: others have no replica of them, so nothing of them travels."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_MARK = "bagua_own"  # of a tensor's attribute


def keep_own(tensors: Iterable[torch.Tensor]) -> None:
    """From now on `broadcast_parameters`, `broadcast_optimizer_state` and every optimizer that is
    made distributed leave these parameters and buffers, and their state, as they are on each rank.

    The mark is on the tensor itself: what `state_dict()` or `copy.deepcopy` make of it has none.
    """
    for tensor in tensors:
        setattr(tensor, _MARK, True)


def is_own(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, _MARK, False))
