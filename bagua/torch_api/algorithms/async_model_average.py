"""Replicas train on their own while their weights are averaged in the background."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua import algorithms
from bagua.common.config import check_one_of
from bagua.torch_api.algorithms.algorithm import Algorithm
from bagua.torch_api.training import distributed_optimizers


@dataclass(frozen=True)
class AsyncModelAverageAlgorithm(Algorithm):
    """Averages `sync_interval_ms` apart, after `warmup_steps` steps with averaged gradients."""

    peer_selection_mode: str = "all"
    sync_interval_ms: int = 500
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_one_of("peer_selection_mode", self.peer_selection_mode, ["all"])
        super().__post_init__()

    def made(self) -> algorithms.Algorithm:
        return algorithms.AsyncModelAverage(
            sync_interval_ms=self.sync_interval_ms, warmup_steps=self.warmup_steps
        )

    def abort(self, model: torch.nn.Module) -> None:
        """Ends averaging in the background, with equal weights everywhere; all ranks call it."""
        for optimizer in distributed_optimizers(model):
            optimizer.pause()
            optimizer.settle()

    def resume(self, model: torch.nn.Module) -> None:
        """Goes on after `abort`; all ranks call it."""
        for optimizer in distributed_optimizers(model):
            optimizer.resume()
