"""Replicas average their weights with some peers instead of sharing gradients with all."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from bagua import algorithms
from bagua.algorithms.exchange import PEERS
from bagua.common.config import check_one_of
from bagua.common.errors import UsageError
from bagua.torch_api.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class DecentralizedAlgorithm(Algorithm):
    """Average weights with all ranks or, shifting from step to step, with one.

    Every `communication_interval` steps; any number of ranks.
    """

    hierarchical: bool = True
    peer_selection_mode: str = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        check_one_of("peer_selection_mode", self.peer_selection_mode, PEERS)
        _check(self.communication_interval)
        super().__post_init__()

    def made(self) -> algorithms.Algorithm:
        return algorithms.Decentralized(
            peers=self.peer_selection_mode,
            every=self.communication_interval,
            hierarchical=self.hierarchical,
        )


@dataclass(frozen=True)
class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """Tell both neighbors in a ring the change of the weights, one byte a value."""

    hierarchical: bool = True
    communication_interval: int = 1

    def __post_init__(self) -> None:
        _check(self.communication_interval)
        super().__post_init__()

    def made(self) -> algorithms.Algorithm:
        return algorithms.LowPrecisionDecentralized(
            every=self.communication_interval, hierarchical=self.hierarchical
        )


def _check(communication_interval: Any) -> None:
    if not isinstance(communication_interval, Integral) or communication_interval < 1:
        raise UsageError(
            "communication_interval is a number of steps, at least 1, not "
            f"{communication_interval!r}"
        )
