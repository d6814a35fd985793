"""Only the largest gradients travel, the others when they have grown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, register
from bagua.common.errors import UsageError


@register
@dataclass(frozen=True)
class TopK(Algorithm):
    """x <- optimizer(x, mean of the largest gradients), the rest is kept and added to the next.

    With `warmup_steps` the share of values that travel falls from a quarter to `density`, by a
    factor of four at a time. `momentum_correction` is Deep Gradient Compression (Lin, Han, Mao,
    Wang, Dally 2018). Bytes per parameter and step: 6 * density * (n - 1).
    """

    codec: str = "topk"
    hierarchical: bool = True
    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec != "topk":
            raise UsageError(
                f"topk is its codec, not {self.codec!r}; give Algorithm(codec={self.codec!r}, ...)"
            )

    @property
    def changes(self) -> bool:
        return bool(self.warmup_steps) or type(self).at is not TopK.at

    def at(self, step: int) -> Algorithm:
        if step >= self.warmup_steps:
            return self
        shares = [0.25]
        while shares[-1] > 4 * self.density:
            shares.append(shares[-1] / 4)
        share = shares[step * len(shares) // self.warmup_steps]
        return replace(self, density=max(share, self.density), warmup_steps=0)
