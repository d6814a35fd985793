"""`ReduceOp`: how values of different ranks become one, under Bagua's names and numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import Union

from bagua.common import kinds
from bagua.common.errors import UsageError


class ReduceOp(IntEnum):
    """How values of different ranks become one."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


BITWISE = (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)

AnyOp = Union[ReduceOp, kinds.ReduceOp, int]

_ENGINES = {
    ReduceOp.SUM: kinds.Sum,
    ReduceOp.PRODUCT: kinds.Product,
    ReduceOp.MIN: kinds.Min,
    ReduceOp.MAX: kinds.Max,
    ReduceOp.AVG: kinds.Average,
}


def bitwise(op: AnyOp) -> ReduceOp | None:
    """The operation if it is one on bits, which the engine does not know."""
    return ReduceOp(op) if op in BITWISE and not isinstance(op, kinds.ReduceOp) else None


def engines(op: AnyOp) -> kinds.ReduceOp:
    """The engine's number of an operation. Its own operations pass: the numbers differ."""
    if isinstance(op, kinds.ReduceOp):
        return op
    try:
        return _ENGINES[ReduceOp(op)]
    except ValueError:
        names = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
        raise UsageError(f"op={op!r} is no reduction; give one of {names}") from None
