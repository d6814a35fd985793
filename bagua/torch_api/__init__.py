"""Bagua's names: scripts written for `bagua.torch_api` run unchanged. See `with_bagua.py`.

Importing this gives every torch.nn.Module one method more, `with_bagua`.
"""

from __future__ import annotations

import bagua.torch as _frontend  # noqa: F401 - first: it says what is missing without torch
from bagua.torch_api import (
    algorithms,
    checkpoint,
    communication,
    contrib,
    data_parallel,
    env,
    model_parallel,
)
from bagua.torch_api.communication import *  # noqa: F403
from bagua.torch_api.with_bagua import with_bagua
from bagua.version import __version__

__all__ = [
    *communication.__all__,
    "__version__",
    "algorithms",
    "checkpoint",
    "communication",
    "contrib",
    "data_parallel",
    "env",
    "model_parallel",
    "with_bagua",
]
