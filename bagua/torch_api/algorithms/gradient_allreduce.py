"""Every rank steps with the same mean of all ranks' gradients."""

from __future__ import annotations

from dataclasses import dataclass

from bagua import algorithms
from bagua.common.kinds import Average, Sum
from bagua.torch_api.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class GradientAllReduceAlgorithm(Algorithm):
    """Exact gradients; `average=False` sums them."""

    hierarchical: bool = False
    average: bool = True

    def made(self) -> algorithms.Algorithm:
        op = Average if self.average else Sum
        return algorithms.GradientAllreduce(op=op, hierarchical=self.hierarchical)
