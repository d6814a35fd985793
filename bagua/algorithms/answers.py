"""What an algorithm says when it is asked, checked: users write algorithms, too."""

from __future__ import annotations

from typing import Any

from bagua.algorithms.algorithm import Algorithm, BucketInfo, Ranks
from bagua.algorithms.exchange import Exchange
from bagua.common.errors import UsageError

# By these the frontend has chosen how to carry an algorithm out before there are any buckets.
FIXED = ("what", "when", "every", "momentum_correction")


def planned(algorithm: Algorithm, bucket: BucketInfo, world: Ranks, step: int) -> Exchange:
    """What happens to this bucket."""
    exchange = algorithm.plan(bucket, world, step)
    _check_kind(algorithm, "plan", exchange, Exchange)
    if odd := _differs(exchange, algorithm._exchange()):
        theirs, own = odd
        raise UsageError(
            f"{_name(algorithm)}.plan returned {theirs}, and the algorithm has {own}: "
            f"{', '.join(FIXED)} are the same for all buckets and belong into fields of the class. "
            "A plan varies the others, as codec, op or peers: "
            "dataclasses.replace(super().plan(bucket, world, step), codec='fp16')"
        )
    return exchange


def at_step(algorithm: Algorithm, step: int) -> Algorithm:
    """The algorithm of this step, counted from when it was chosen."""
    found = algorithm.at(step)
    _check_kind(algorithm, "at", found, Algorithm)
    return found


def of_parameter(algorithm: Algorithm, name: str, shape: tuple[int, ...]) -> Algorithm:
    """The algorithm of this parameter."""
    found = algorithm.of(name, shape)
    if found is algorithm:
        return found
    _check_kind(algorithm, "of", found, Algorithm)
    if odd := _differs(found._exchange(), algorithm._exchange()):
        theirs, own = odd
        raise UsageError(
            f"{_name(algorithm)}.of returned {found!r} for {name}, with {theirs} where the "
            f"algorithm has {own}: parameters of one optimizer share {', '.join(FIXED)}. Give "
            "those that do not an optimizer of their own"
        )
    return found


def _differs(given: Exchange, own: Exchange) -> tuple[str, str] | None:
    """The first choice that is fixed and not the same, in both."""
    for field in FIXED:
        theirs, mine = getattr(given, field), getattr(own, field)
        if theirs != mine:
            return f"{field}={theirs!r}", f"{field}={mine!r}"
    return None


def _check_kind(algorithm: Algorithm, method: str, given: Any, kind: type) -> None:
    if not isinstance(given, kind):
        raise UsageError(
            f"{_name(algorithm)}.{method} returned {given!r}; it must return an {kind.__name__}"
        )


def _name(algorithm: Algorithm) -> str:
    return type(algorithm).__name__
