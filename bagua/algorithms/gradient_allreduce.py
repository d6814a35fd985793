"""Every rank steps with the same mean of all ranks' gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, register


@register
@dataclass(frozen=True)
class GradientAllreduce(Algorithm):
    """x <- optimizer(x, mean of gradients), exact. Bytes per parameter and step: 8, for fp32.

    With `codec="fp16"` or `"bf16"` half as many, rounded.
    """

    name: ClassVar[str] = "gradient_allreduce"
