"""Batch normalization over the batches of all ranks."""

from bagua.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
