"""The user's wish for which gradients are exchanged together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
