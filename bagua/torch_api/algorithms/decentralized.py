"""Replicas average their weights with some peers instead of sharing gradients with all."""

from __future__ import annotations

from dataclasses import dataclass

from bagua import algorithms
from bagua.torch_api.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class DecentralizedAlgorithm(Algorithm):
    """Average weights with all ranks or, shifting from step to step, with one.

    Every `communication_interval` steps; any number of ranks.
    """

    hierarchical: bool = True
    peer_selection_mode: str = "all"
    communication_interval: int = 1

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

    def made(self) -> algorithms.Algorithm:
        return algorithms.LowPrecisionDecentralized(
            every=self.communication_interval, hierarchical=self.hierarchical
        )
