"""Every rank steps with the same mean of all ranks' gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, BucketInfo, Exchange, Ranks, register
from bagua.common.kinds import ReduceOp


@register
@dataclass(frozen=True)
class GradientAllreduce(Algorithm):
    """x <- optimizer(x, mean of gradients), exact. Bytes per parameter and step: 8, for fp32."""

    op: ReduceOp = ReduceOp.Average
    name: ClassVar[str] = "gradient_allreduce"

    def plan(self, bucket: BucketInfo, world: Ranks, step: int) -> Exchange:
        return Exchange(op=self.op)
