"""Gradients on the wire as one byte a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, register


@register
@dataclass(frozen=True)
class ByteGrad(Algorithm):
    """x <- optimizer(x, mean of gradients), through minmax_u8. Bytes per parameter and step: 2.03.

    Ranks of one machine add up exactly, and what they send to other machines is encoded; a job on
    one machine encodes nothing.
    """

    codec: str = "minmax_u8"
    hierarchical: bool = True
    name: ClassVar[str] = "bytegrad"
