"""What an algorithm is: a plan for each bucket, in data that a frontend carries out."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp


@dataclass(frozen=True)
class BucketInfo:
    """What a plan may depend on."""

    name: str
    index: int  # 0 becomes ready first
    dtype: str
    count: int  # elements
    nbytes: int


class Ranks(Protocol):
    """The part of the world a plan may depend on."""

    rank: int
    size: int
    local_size: int


@dataclass(frozen=True)
class Exchange:
    """What happens to one bucket in one step."""

    what: str = "grad"  # what travels
    collective: str = "auto"  # a row of the engine's table, or "auto"
    codec: str = "raw"  # the wire format
    when: str = "backward"  # during backward; the result is there when backward returns
    op: ReduceOp = ReduceOp.Average

    # What this version can carry out.
    _known: ClassVar[dict[str, tuple[str, ...]]] = {
        "what": ("grad",),
        "collective": ("auto",),
        "codec": ("raw",),
        "when": ("backward",),
    }

    def __post_init__(self) -> None:
        for field, known in self._known.items():
            value = getattr(self, field)
            if value not in known:
                raise UsageError(
                    f"exchange {field}={value!r} is not in this version; known: {', '.join(known)}"
                )


class Algorithm:
    """Base of all algorithms. Subclass as a frozen dataclass, give it a `name`, write `plan`.

    >>> @register
    ... @dataclass(frozen=True)
    ... class SumOfGradients(Algorithm):
    ...     name: ClassVar[str] = "sum_of_gradients"
    ...
    ...     def plan(self, bucket, world, step):
    ...         return Exchange(op=ReduceOp.Sum)
    >>> find("sum_of_gradients")
    SumOfGradients()
    """

    name: ClassVar[str] = ""

    def plan(self, bucket: BucketInfo, world: Ranks, step: int) -> Exchange:
        """What to do with this bucket in this step; the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} has no plan")


_REGISTRY: dict[str, type[Algorithm]] = {}

_A = TypeVar("_A", bound=type[Algorithm])


def register(algorithm: _A) -> _A:
    """Makes an algorithm known by its name."""
    if not algorithm.name:
        raise UsageError(f"{algorithm.__name__} needs a name to be registered")
    _REGISTRY[algorithm.name] = algorithm
    return algorithm


def names() -> list[str]:
    return sorted(_REGISTRY)


def find(algorithm: str | Algorithm) -> Algorithm:
    """The algorithm of that name with its defaults, or the object itself."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if algorithm in _REGISTRY:
        return _REGISTRY[algorithm]()
    near = difflib.get_close_matches(str(algorithm), _REGISTRY, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"unknown algorithm {algorithm!r}{hint}; known: {', '.join(names())}")
