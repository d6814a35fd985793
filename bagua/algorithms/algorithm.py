"""What an algorithm is: a plan for each bucket, in data that a frontend carries out."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from bagua.algorithms.exchange import CODECS, LOSSY, TIMES, Exchange, as_written, check_kinds
from bagua.algorithms.other_names import here
from bagua.common.config import nearest
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
    seed: int = 0  # of random peers
    when: str = ""  # empty: the usual time for what travels
    every: int = 1
    op: ReduceOp = ReduceOp.Average
    hierarchical: bool = False
    error_feedback: bool | None = None
    density: float = 0.01
    values: str = "raw"
    low_rank: int = 0  # matrices travel as products of two thin ones, of so many columns
    momentum_correction: float = 0.0  # velocities travel: so much of the last one + the gradient
    # Parameters that travel as they are, whatever the codec: patterns of names, or a function of
    # name and shape. None: norms and biases, where the codec loses more than a rounding.
    exact: Sequence[str] | Callable[[str, tuple[int, ...]], bool] | None = None
    warmup_steps: int = 0  # so many first steps average gradients, exactly
    name: ClassVar[str] = ""

    def __new__(cls, *_: Any, **arguments: Any) -> Algorithm:
        _check_fields(cls)
        check_arguments(cls, arguments)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        check_kinds(self)
        if isinstance(self.exact, str):
            raise UsageError(f"exact is a list of patterns, not one: exact=[{self.exact!r}]")
        if not (self.exact is None or callable(self.exact) or isinstance(self.exact, Sequence)):
            raise UsageError(f"exact is a list of patterns or a function, not {self.exact!r}")
        if self.exact is not None and self.what == "weight":
            raise UsageError(
                "exact= is for gradients, momentum and changes; weights travel as they are, or, "
                "with a codec, all of them as neighbors know them"
            )
        self._check_topk()
        if self.warmup_steps < 0 or self.warmup_steps != int(self.warmup_steps):
            raise UsageError(f"warmup_steps is a number of steps, not {self.warmup_steps}")
        if self.what == "momentum" and self.warmup_steps < 1:
            raise UsageError(
                "what='momentum' needs a warm-up, in which the optimizer learns the variance: "
                "warmup_steps=1 or more"
            )
        self._exchange()

    def _check_topk(self) -> None:
        """Not in `Exchange`: a plan may take another codec for some buckets."""
        for field in ("density", "values"):
            value = getattr(self, field)
            if self.codec != "topk" and value != getattr(Exchange, field):
                raise UsageError(
                    f"{field}={value!r} is for codec='topk', and would do nothing with "
                    f"{self.codec!r}; leave it out"
                )

    __repr__ = as_written

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):
            cls.__repr__ = as_written  # type: ignore[assignment]  # dataclass() leaves it as it is

    def plan(self, bucket: BucketInfo, world: Ranks, step: int) -> Exchange:
        """What to do with this bucket; the same on every rank.

        Asked when buckets are made, in this step, and not again before they are made anew: what
        changes with time is for `at`.
        """
        return self._exchange()

    def at(self, step: int) -> Algorithm:
        """The algorithm of this step: itself, or another one, for which buckets are made anew.

        Asked in every step, counted from when this algorithm was chosen; the same on every rank.
        """
        if step >= self.warmup_steps:
            return self
        # What ranks keep of their own gradients goes on.
        momentum, hierarchical = self.momentum_correction, self.hierarchical
        return Algorithm(op=self.op, hierarchical=hierarchical, momentum_correction=momentum)

    @property
    def changes(self) -> bool:
        """Whether `at` may say so in any step."""
        return bool(self.warmup_steps) or type(self).at is not Algorithm.at

    def of(self, name: str, shape: tuple[int, ...]) -> Algorithm:
        """The algorithm of this parameter: itself, unless parameters differ."""
        return self

    def keeps_exact(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether this parameter's values travel as they are."""
        if self.low_rank and not _shrinks(shape, self.low_rank):
            return True
        if self.exact is None:
            return self.codec in LOSSY and self.what != "weight" and len(shape) < 2
        if callable(self.exact):
            return bool(self.exact(name, shape))
        return any(fnmatchcase(name, pattern) for pattern in self.exact)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that none of these names matches."""
        patterns = () if self.exact is None or callable(self.exact) else self.exact
        return without_match(patterns, names)

    def _exchange(self) -> Exchange:
        mine = {field.name for field in fields(self)}
        chosen = {f.name: getattr(self, f.name) for f in fields(Exchange) if f.name in mine}
        if not self.when and self.what in TIMES:
            chosen["when"] = TIMES[self.what][0]
        return Exchange(**chosen)


def without_match(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    names = list(names)
    return [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]


def check_arguments(cls: type, arguments: Iterable[str]) -> None:
    """Refuses a keyword that the class does not take, and says what it takes."""
    known = _arguments_of(cls)
    for name in arguments:
        if known is not None and name not in known:
            raise UsageError(
                f"{cls.__name__} has no argument {name}{here(name, known)}; it has: "
                f"{', '.join(known) or 'none'}"
            )


# Both caches: some algorithms make an object in every step.


@functools.cache
def _arguments_of(cls: type) -> list[str] | None:
    """The keywords that it takes; None: any."""
    taken = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    if any(each.kind is each.VAR_KEYWORD for each in taken):
        return None
    return [each.name for each in taken]


def _check_fields(cls: type) -> None:
    """Refuses defaults that `__init__` does not know, for want of a decorator or an annotation."""
    if lost := _lost_field(cls):
        typed = f" and write a type, as in {lost[0]}: str = ..." if lost[1] else ""
        raise UsageError(
            f"{cls.__name__}.{lost[0]} would not count, since it is no field: put "
            f"@dataclass(frozen=True) above the class{typed}"
        )


@functools.cache
def _lost_field(cls: Any) -> tuple[str, bool] | None:
    """One, and whether it has no type."""
    known = {field.name: field.default for field in fields(cls)}
    own = {name: v for name, v in vars(cls).items() if not inspect.ismemberdescriptor(v)}
    lost = [name for name in own if name in known and own[name] is not known[name]]
    # In Python 3.9 these may be inherited, where all of them are known.
    annotations = own.get("__annotations__") or getattr(cls, "__annotations__", {})
    lost += [n for n, kind in annotations.items() if n not in known and "ClassVar" not in str(kind)]
    return (lost[0], lost[0] not in annotations) if lost else None


def take_plain_numbers(algorithm: Any) -> None:
    """Python's in place of NumPy's: ranks compare how algorithms are written."""
    for field in fields(algorithm):
        value = getattr(algorithm, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(algorithm, field.name, value.item())


def _shrinks(shape: tuple[int, ...], rank: int) -> bool:
    """Whether a matrix has more values than two thin ones whose product it is."""
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows + columns) * rank < rows * columns


_REGISTRY: dict[str, type[Algorithm]] = {}

_A = TypeVar("_A", bound=type[Algorithm])


def register(algorithm: _A) -> _A:
    """Makes an algorithm known by its name, which no other class has."""
    if not algorithm.name:
        raise UsageError(f"{algorithm.__name__} needs a name to be registered")
    _check_fields(algorithm)
    before = _REGISTRY.get(algorithm.name, algorithm)
    # The same class again is one that a notebook or a reload has defined anew.
    if _place(before) != _place(algorithm):
        raise UsageError(
            f"the name {algorithm.name!r} is that of {_place(before)}: give {algorithm.__name__} "
            "one of its own, name: ClassVar[str] = ..."
        )
    _REGISTRY[algorithm.name] = algorithm
    return algorithm


def _place(algorithm: type[Algorithm]) -> str:
    return f"{algorithm.__module__}.{algorithm.__qualname__}"


def names() -> list[str]:
    return sorted(_REGISTRY)


def find(algorithm: str | Algorithm, others: Iterable[str] = ()) -> Algorithm:
    """The algorithm of that name with its defaults, or the object itself.

    Who is told of a misspelt one hears of `others`, too, which the caller knows.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        raise UsageError(
            f"algorithm={algorithm.__name__} is a class; give an instance: {algorithm.__name__}()"
        )
    if not isinstance(algorithm, str):
        raise UsageError(
            f"an algorithm is a name, as 'bytegrad', or an object, as ByteGrad(), not {algorithm!r}"
        )
    if algorithm in _REGISTRY:
        return _REGISTRY[algorithm]()
    if (codec := algorithm.lower()) in CODECS:
        feedback = ", error_feedback=True" if codec == "minmax_u4" else ""
        raise UsageError(
            f"{codec!r} is a codec, which algorithms combine with other choices: give "
            f"bagua.algorithms.ByteGrad(codec={codec!r}{feedback}) in the script"
        )
    known = sorted({*names(), *others})
    hint = nearest(algorithm, known) or (
        "; one of the script's own must be registered before DistributedOptimizer is made"
    )
    raise UsageError(f"unknown algorithm {algorithm!r}; known: {', '.join(known)}{hint}")
