"""Checkpoints of a model on all ranks. See `checkpointing.py`."""

from bagua.torch_api.checkpoint.checkpointing import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
