"""Who this process is, as scripts also ask for it."""

from __future__ import annotations

from bagua.torch_api.world import get_local_rank, get_local_size, get_rank, get_world_size

__all__ = ["get_local_rank", "get_local_size", "get_rank", "get_world_size"]
