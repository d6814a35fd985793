"""Adam whose momentum travels as one byte a value once the variance has settled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bagua import algorithms
from bagua import torch as frontend
from bagua.torch_api.algorithms.algorithm import Algorithm

__all__ = ["QAdamAlgorithm", "QAdamOptimizer"]

QAdamOptimizer = getattr(frontend, "QAdam", None)


@dataclass(frozen=True)
class QAdamAlgorithm(Algorithm):
    """For a `QAdamOptimizer`, which says how many steps are warm-up."""

    q_adam_optimizer: Any
    hierarchical: bool = True

    def made(self) -> algorithms.Algorithm:
        return algorithms.QAdam(  # type: ignore[attr-defined,no-any-return]
            warmup_steps=self.q_adam_optimizer.warmup_steps, hierarchical=self.hierarchical
        )
