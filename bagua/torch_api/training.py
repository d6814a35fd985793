"""What a model under `with_bagua` keeps."""

from __future__ import annotations

from typing import Any

import torch

from bagua.torch import DistributedOptimizer
from bagua.torch_api.attachment import Attachment

NAME = "bagua_training"  # of the model's attribute


class Training:
    """The attachments of a model's optimizers. A copy of the model, or a saved one, has none."""

    def __init__(self) -> None:
        self.attachments: list[Attachment] = []

    def __reduce__(self) -> Any:
        return Training, ()


def training_of(model: torch.nn.Module) -> Training:
    return getattr(model, NAME, None) or Training()


def distributed_optimizers(model: torch.nn.Module) -> list[DistributedOptimizer]:
    """What `with_bagua` made of the model's optimizers; none on a rank outside of the group."""
    return [attachment.distributed for attachment in training_of(model).attachments]
