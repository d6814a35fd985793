"""Neighbors on a ring tell each other how their weights have moved, as one byte a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, register
from bagua.common.errors import UsageError


@register
@dataclass(frozen=True)
class LowPrecisionDecentralized(Algorithm):
    """After a step x is mixed with what neighbors are known to have. Bytes: 2.03.

    Each rank keeps three copies of the weights: its own and its neighbors', as their changes told.
    It costs a link less than any algorithm that talks to everyone, in a ring of any length.
    """

    what: str = "weight"
    codec: str = "minmax_u8"
    peers: str = "ring"
    when: str = "step"
    hierarchical: bool = True
    name: ClassVar[str] = "low_precision_decentralized"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec == "raw":
            raise UsageError(
                "low_precision_decentralized tells changes through a codec; weights as they are "
                "travel in a ring by Decentralized(peers='ring', when='step')"
            )
