"""Adam whose momentum travels as one byte a value once the variance has settled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua import algorithms
from bagua.common.errors import UsageError
from bagua.torch import QAdam as QAdamOptimizer
from bagua.torch_api.algorithms.algorithm import Algorithm

__all__ = ["QAdamAlgorithm", "QAdamOptimizer"]


@dataclass(frozen=True)
class QAdamAlgorithm(Algorithm):
    """For a `QAdamOptimizer`, which says how many steps are warm-up."""

    q_adam_optimizer: QAdamOptimizer
    hierarchical: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.q_adam_optimizer, QAdamOptimizer):
            raise UsageError(
                f"a QAdamOptimizer is needed, not {type(self.q_adam_optimizer).__name__}"
            )
        super().__post_init__()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.q_adam_optimizer]

    def made(self) -> algorithms.Algorithm:
        return algorithms.QAdam(
            warmup_steps=self.q_adam_optimizer.warmup_steps, hierarchical=self.hierarchical
        )
