"""Optimizers whose step is a few calls, however many parameters there are."""

from bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer, is_fused_optimizer

__all__ = ["fuse_optimizer", "is_fused_optimizer"]
