"""What the algorithms under Bagua's names have in common, and their table."""

from __future__ import annotations

import dataclasses
import importlib
from numbers import Real
from typing import Any, Union

import torch

from bagua import algorithms
from bagua.algorithms.algorithm import check_arguments, find, take_plain_numbers
from bagua.common.config import nearest
from bagua.common.errors import UsageError

# Name: module beside this one, and class.
_KNOWN = {
    "gradient_allreduce": ("gradient_allreduce", "GradientAllReduceAlgorithm"),
    "bytegrad": ("bytegrad", "ByteGradAlgorithm"),
    "decentralized": ("decentralized", "DecentralizedAlgorithm"),
    "low_precision_decentralized": ("decentralized", "LowPrecisionDecentralizedAlgorithm"),
    "qadam": ("q_adam", "QAdamAlgorithm"),
    "async": ("async_model_average", "AsyncModelAverageAlgorithm"),
}


class Algorithm:
    """An algorithm by Bagua's arguments; `made` is the same by ours.

    Each is a frozen dataclass, and what is wrong with an argument is an error here and not when a
    model is given it.
    """

    def __new__(cls, *_: Any, **arguments: Any) -> Algorithm:
        check_arguments(cls, arguments)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise UsageError(f"{field.name} is True or False, not {value!r}")
            numeric = type(field.default) is int
            if numeric and (isinstance(value, bool) or not isinstance(value, Real)):
                raise UsageError(f"{field.name} is a number, not {value!r}")
        self.made()

    def made(self) -> algorithms.Algorithm:
        raise NotImplementedError

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that it was given, for who names none."""
        return []

    @classmethod
    def init(cls, name: str, **arguments: Any) -> Algorithm:
        """The algorithm of that name: `Algorithm.init("bytegrad", average=False)`."""
        if not isinstance(name, str) or name not in _KNOWN:
            raise UsageError(
                f"unknown algorithm {name!r}; known: {', '.join(sorted(_KNOWN))}"
                f"{nearest(str(name), _KNOWN)}"
            )
        module, kind = _KNOWN[name]
        home = importlib.import_module(f"bagua.torch_api.algorithms.{module}")
        made_by = getattr(home, kind)
        for field in dataclasses.fields(made_by):
            if field.default is dataclasses.MISSING and field.name not in arguments:
                raise UsageError(
                    f"{name} needs {field.name}: Algorithm.init({name!r}, {field.name}=...)"
                )
        algorithm: Algorithm = made_by(**arguments)
        return algorithm


AnyAlgorithm = Union[Algorithm, algorithms.Algorithm, str]


def made(algorithm: AnyAlgorithm) -> algorithms.Algorithm:
    """The algorithm as the optimizer wants it; one of `bagua.algorithms` is that already."""
    if isinstance(algorithm, str):
        if algorithm not in _KNOWN:
            return find(algorithm, others=_KNOWN)
        algorithm = Algorithm.init(algorithm)
    if isinstance(algorithm, Algorithm):
        return algorithm.made()
    if isinstance(algorithm, algorithms.Algorithm):
        return algorithm
    called = isinstance(algorithm, type) and issubclass(
        algorithm, (Algorithm, algorithms.Algorithm)
    )
    hint = f"; write {algorithm.__name__}()" if called else ""
    raise UsageError(
        "an algorithm of bagua.torch_api.algorithms or bagua.algorithms is needed, or a name, not "
        f"{type(algorithm).__name__}{hint}"
    )
