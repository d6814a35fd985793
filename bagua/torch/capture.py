"""Steps captured in a CUDA graph: all that a step decides on the host is then decided for ever."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.common.errors import UsageError


def refuse(params: Sequence[torch.Tensor], why: str) -> None:
    """Raises where the work on these parameters is being captured."""
    if is_capturing(params):
        raise UsageError(f"this step cannot be captured in a CUDA graph: {why}")


def is_capturing(params: Sequence[torch.Tensor]) -> bool:
    return any(p.is_cuda for p in params) and torch.cuda.is_current_stream_capturing()
