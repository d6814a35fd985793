"""Ranks average weights with one peer at a time, while the model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, register


@register
@dataclass(frozen=True)
class Decentralized(Algorithm):
    """x <- average of x over its peers - step of the optimizer at x. Bytes: 4, for fp32.

    The average travels during forward and backward, and is there when the optimizer steps. Replicas
    differ a little; `settle()` makes them equal. Peers: `shift_one`, another rank each step until
    all have met (of an odd number one rests), `random`, a pair drawn anew each step from `seed`,
    `exponential`, `ring` (8 bytes) or `all` (8).
    """

    what: str = "weight"
    peers: str = "shift_one"
    when: str = "forward"
    hierarchical: bool = True
    name: ClassVar[str] = "decentralized"
