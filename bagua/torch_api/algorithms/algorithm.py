"""What the algorithms under Bagua's names have in common, and their table."""

from __future__ import annotations

import importlib
from typing import Any, Union

from bagua import algorithms
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
    """An algorithm by Bagua's arguments; `made` is the same by ours."""

    def made(self) -> algorithms.Algorithm:
        raise NotImplementedError

    @classmethod
    def init(cls, name: str, **arguments: Any) -> Algorithm:
        """The algorithm of that name: `Algorithm.init("bytegrad", average=False)`."""
        if name not in _KNOWN:
            raise UsageError(
                f"unknown algorithm {name!r}{nearest(str(name), _KNOWN)}; known: "
                f"{', '.join(sorted(_KNOWN))}"
            )
        module, kind = _KNOWN[name]
        home = importlib.import_module(f"bagua.torch_api.algorithms.{module}")
        algorithm: Algorithm = getattr(home, kind)(**arguments)
        return algorithm


AnyAlgorithm = Union[Algorithm, algorithms.Algorithm, str]


def made(algorithm: AnyAlgorithm) -> algorithms.Algorithm:
    """The algorithm as the optimizer wants it; one of `bagua.algorithms` is that already."""
    if isinstance(algorithm, str):
        algorithm = Algorithm.init(algorithm)
    if isinstance(algorithm, Algorithm):
        return algorithm.made()
    if isinstance(algorithm, algorithms.Algorithm):
        return algorithm
    raise UsageError(
        "an algorithm of bagua.torch_api.algorithms or bagua.algorithms is needed, or a name, not "
        f"{type(algorithm).__name__}"
    )
