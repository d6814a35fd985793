"""What an algorithm is: a plan for each bucket, in data that a frontend carries out."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import ClassVar, Protocol, TypeVar

from bagua.algorithms.exchange import LOSSY, Exchange
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
class Algorithm:
    """How replicas communicate: choices that can be combined, or a subclass with a `plan`.

    >>> Algorithm(codec="minmax_u8", error_feedback=True)
    Algorithm(codec='minmax_u8', error_feedback=True)

    A subclass is a frozen dataclass with a `name`: other defaults, or its own `plan`.

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

    what: str = "grad"
    codec: str = "raw"
    peers: str = "all"
    when: str = "backward"
    every: int = 1
    op: ReduceOp = ReduceOp.Average
    hierarchical: bool = False
    error_feedback: bool | None = None
    density: float = 0.01
    values: str = "raw"
    # Parameters that travel as they are, whatever the codec: patterns of names, or a function of
    # name and shape. None: norms and biases, where the codec loses more than a rounding.
    exact: Sequence[str] | Callable[[str, tuple[int, ...]], bool] | None = None
    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.peers != "all":
            raise UsageError(f"peers={self.peers!r} is not in this version; known: all")
        if self.every != 1:
            raise UsageError(f"every={self.every} is not in this version; known: 1")
        if isinstance(self.exact, str):
            raise UsageError(f"exact is a list of patterns, not one: exact=[{self.exact!r}]")
        self._exchange()

    def __repr__(self) -> str:
        chosen = [
            f"{f.name}={_said(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(chosen)})"

    def plan(self, bucket: BucketInfo, world: Ranks, step: int) -> Exchange:
        """What to do with this bucket in this step; the same on every rank."""
        return self._exchange()

    def keeps_exact(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether this parameter's values travel as they are."""
        if self.exact is None:
            return self.codec in LOSSY and len(shape) < 2
        if callable(self.exact):
            return bool(self.exact(name, shape))
        return any(fnmatchcase(name, pattern) for pattern in self.exact)

    def _exchange(self) -> Exchange:
        return Exchange(
            what=self.what,
            codec=self.codec,
            when=self.when,
            op=self.op,
            hierarchical=self.hierarchical,
            error_feedback=self.error_feedback,
            density=self.density,
            values=self.values,
        )


def _said(value: object) -> str:
    """The same in every process, also of a function."""
    return getattr(value, "__qualname__", repr(value))


_REGISTRY: dict[str, type[Algorithm]] = {}

_A = TypeVar("_A", bound=type[Algorithm])


def register(algorithm: _A) -> _A:
    """Makes an algorithm known by its name."""
    if not algorithm.name:
        raise UsageError(f"{algorithm.__name__} needs a name to be registered")
    algorithm.__repr__ = Algorithm.__repr__  # type: ignore[method-assign]
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
