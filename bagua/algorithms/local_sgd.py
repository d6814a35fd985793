"""Ranks train alone for some steps, then step together by what they have learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, register


@register
@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Every so many steps x <- mean of x. Bytes: 8 / every.

    With `when="forward"` the exchange of a round runs while the next one computes.
    """

    what: str = "delta"
    when: str = "step"
    every: int = 16
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    name: ClassVar[str] = "local_sgd"


@register
@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Local SGD whose common step has Nesterov momentum (Douillard and others 2023)."""

    every: int = 64
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    name: ClassVar[str] = "diloco"
