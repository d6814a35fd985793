"""Steps captured in a CUDA graph: all that a step decides on the host is then decided for ever."""

from __future__ import annotations

import torch

from bagua.common.errors import UsageError


def refuse(why: str, *about: object) -> None:
    """Raises where work is being captured; `why` takes what it is about by `%`."""
    if is_capturing():
        raise UsageError(f"this step cannot be captured in a CUDA graph: {why % about}")


def is_capturing() -> bool:
    """Whether the current stream is captured. Costs next to nothing where there is no GPU."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
