"""Gradients on the wire as one byte a value."""

from __future__ import annotations

from dataclasses import dataclass

from bagua import algorithms
from bagua.common.kinds import Average, Sum
from bagua.torch_api.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class ByteGradAlgorithm(Algorithm):
    """`hierarchical`: exact between ranks of one machine, encoded between machines."""

    hierarchical: bool = True
    average: bool = True

    def made(self) -> algorithms.Algorithm:
        op = Average if self.average else Sum
        return algorithms.ByteGrad(op=op, hierarchical=self.hierarchical)
