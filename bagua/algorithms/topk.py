"""Only the largest gradients travel, the others when they have grown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, register


@register
@dataclass(frozen=True)
class TopK(Algorithm):
    """x <- optimizer(x, mean of the largest gradients), the rest is kept and added to the next.

    Bytes per parameter and step at density 0.01: 0.12.
    """

    codec: str = "topk"
    hierarchical: bool = True
    name: ClassVar[str] = "topk"
