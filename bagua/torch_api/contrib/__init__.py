"""What Bagua keeps beside its core."""

from bagua.torch_api.contrib import fuse, sync_batchnorm
from bagua.torch_api.contrib.fuse import fuse_optimizer
from bagua.torch_api.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm

__all__ = [
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "SyncBatchNorm",
    "fuse",
    "fuse_optimizer",
    "sync_batchnorm",
]
