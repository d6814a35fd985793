"""The user's wish for which gradients are exchanged together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.torch.slot import Slot


class Grouping:
    """The user's wish for which parameters are exchanged together; false if there is none."""

    def __init__(self, num_groups: int, groups: Sequence[Sequence[torch.Tensor]] | None) -> None:
        self._num_groups = num_groups
        self._groups = groups

    def __bool__(self) -> bool:
        return bool(self._num_groups or self._groups)

    def apply(self, slots: Sequence[Slot]) -> list[list[Slot]]:
        if self._groups:
            number = {id(p): i for i, group in enumerate(self._groups) for p in group}
            runs: dict[Any, list[Slot]] = {}
            for slot in slots:
                runs.setdefault(number.get(id(slot.param), slot.name), []).append(slot)
            return list(runs.values())
        if self._num_groups:
            size = -(-len(slots) // self._num_groups)
            return [list(slots[at : at + size]) for at in range(0, len(slots), max(size, 1))]
        return []


def checked_groups(num_groups: Any, groups: Any) -> tuple[int, list[list[torch.Tensor]] | None]:
    """What a user has said of both; a number of groups may stand in either."""
    if isinstance(groups, Integral):  # what num_groups was called later
        num_groups, groups = groups, None
    if not isinstance(num_groups, Integral) or isinstance(num_groups, bool) or num_groups < 0:
        raise UsageError(
            f"num_groups={num_groups!r}: a number of buckets is needed, or 0 to let bucket_mb "
            "decide"
        )
    if groups is None:
        return int(num_groups), None
    lists = [_tensors(group) for group in groups] if isinstance(groups, (list, tuple)) else [None]
    if None in lists:
        raise UsageError(f"groups is a list of lists of parameters, not {groups!r:.100}")
    found = [group for group in lists if group is not None]
    if len({id(param) for group in found for param in group}) < sum(map(len, found)):
        raise UsageError("groups has a parameter twice; a gradient is exchanged once")
    return int(num_groups), found


def _tensors(group: Any) -> list[torch.Tensor] | None:
    if isinstance(group, (torch.Tensor, str)) or not isinstance(group, Iterable):
        return None
    params = list(group)
    return params if all(isinstance(param, torch.Tensor) for param in params) else None
