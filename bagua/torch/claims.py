"""Which optimizers exchange the gradient of one parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from bagua.common.errors import UsageError

if TYPE_CHECKING:
    from bagua.torch.slot import Slot


class _Claims:
    """How many optimizers exchange the gradient of a parameter."""

    def __init__(self) -> None:
        self._counts: Any = WeakTensorKeyDictionary()
        self._of_several: Any = WeakTensorKeyDictionary()

    @property
    def contested(self) -> bool:
        """Whether any parameter that is alive is one of several."""
        return len(self._of_several) > 0

    def add(self, param: torch.Tensor) -> None:
        count = self._counts[param] = self._counts.get(param, 0) + 1
        if count == 2:
            self._of_several[param] = True

    def is_contested(self, param: torch.Tensor) -> bool:
        return self._counts.get(param, 0) > 1

    def check(self, slots: Iterable[Slot]) -> None:
        """Those of one backward pass: a parameter has one gradient, of one exchange."""
        terms: dict[torch.Tensor, str] = {}
        for slot in slots:
            if slot.bucket is None or not self.is_contested(slot.param):
                continue
            mine = slot.bucket.terms
            theirs = terms.setdefault(slot.param, mine)
            if mine != theirs:
                raise UsageError(
                    f"two optimizers exchange the gradient of {slot.name} in one backward pass: "
                    f"{theirs}, and {mine}. Give both the same, or one of them its own pass"
                )

    def drop(self, param: torch.Tensor) -> None:
        count = self._counts.get(param)
        if count:  # it may be half collected
            self._counts[param] = count - 1
            if count == 2:
                del self._of_several[param]


claims = _Claims()
