"""Gradients of matrices travel as the product of two thin ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, register
from bagua.common.errors import UsageError


@register
@dataclass(frozen=True)
class PowerSGD(Algorithm):
    """G + e ~ P Q', both averaged; what is lost comes next time. Bytes: 8 r (m + n) / (m n).

    One step of the power method from the last Q (Vogels, Karimireddy, Jaggi 2019). Vectors, and
    matrices that would not become smaller, travel as they are.
    """

    low_rank: int = 2
    warmup_steps: int = 10
    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_rank < 1:
            raise UsageError(
                f"low_rank is the width of thin matrices, at least 1, not {self.low_rank}"
            )
