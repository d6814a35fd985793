"""Different algorithms for different parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from bagua.algorithms.algorithm import Algorithm, find, without_match
from bagua.common.errors import UsageError


@dataclass(frozen=True)
class PerParameter(Algorithm):
    """The algorithm of each parameter: the first pattern that its name matches, or a function's.

    >>> mixed = PerParameter({"embedding.*": "topk", "*": "bytegrad"})
    >>> mixed.of("embedding.weight", (1000, 64))
    TopK()

    All of them exchange gradients; what matches nothing is averaged exactly.
    """

    choice: Mapping[str, Any] | Callable[[str, tuple[int, ...]], Any] | None = None
    name: ClassVar[str] = ""

    def __init__(self, choice: Mapping[str, Any] | Callable[[str, tuple[int, ...]], Any]) -> None:
        if not callable(choice):
            choice = {pattern: _of_gradients(algorithm) for pattern, algorithm in choice.items()}
        object.__setattr__(self, "choice", choice)

    def of(self, name: str, shape: tuple[int, ...]) -> Algorithm:
        if callable(self.choice):
            return _of_gradients(self.choice(name, shape) or Algorithm())
        for pattern, algorithm in (self.choice or {}).items():
            if fnmatchcase(name, pattern):
                return algorithm  # type: ignore[no-any-return]
        return Algorithm()

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Also those of the algorithms that are chosen among."""
        names, choice = list(names), {} if callable(self.choice) else self.choice or {}
        theirs = [p for algorithm in choice.values() for p in algorithm.unmatched(names)]
        return without_match(choice, names) + theirs


def _of_gradients(algorithm: str | Algorithm) -> Algorithm:
    found = find(algorithm)
    if found.momentum_correction:
        raise UsageError(f"{found!r} has a momentum, which parameters of one optimizer must share")
    if found.what != "grad" or found.warmup_steps:
        raise UsageError(
            f"parameters of one optimizer can differ in how gradients travel; {found!r} exchanges "
            f"{found.what}{' after a warm-up' if found.warmup_steps else ''}. Give such parameters "
            "an optimizer of their own"
        )
    return found
