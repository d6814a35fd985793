"""Training never waits: weights are averaged in the background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, register


@register
@dataclass(frozen=True)
class AsyncModelAverage(Algorithm):
    """Every so often x += mean of all x - own x, as of some steps ago.

    A slow rank delays the next average, not the others' training. Bytes: 8 per average, for fp32.
    """

    what: str = "weight"
    when: str = "background"
    sync_interval_ms: float = 500.0
    name: ClassVar[str] = "async_model_average"
