"""The ranks of the job under the names that Bagua gave them."""

from __future__ import annotations

from typing import Any

from bagua.common.running import World
from bagua.common.world import init, shutdown, world
from bagua.common.world import is_initialized as is_initialized
from bagua.torch_api import torch_distributed

_beside: World | None = None  # the world that torch.distributed has been started beside


def init_process_group(store: Any = None, **settings: Any) -> None:
    """Starts the engine and torch.distributed, on every rank; does nothing if they run already.

    Ranks meet through MPI, so no `store` is needed. `settings` are those of `bagua.init`.
    """
    global _beside
    init(**settings)
    if _beside is not world():
        _beside = world()
        torch_distributed.start()


def destroy_process_group() -> None:
    """Stops what `init_process_group` has started, on every rank; it may follow again.

    Open requests fail.
    """
    global _beside
    _beside = None
    torch_distributed.end()
    shutdown()


# Scripts choose their device by the local rank before they call init_process_group; so whichever
# of these comes first starts the engine, too.


def get_rank() -> int:
    """This process's number; starts the engine if need be."""
    return _running().rank


def get_world_size() -> int:
    """How many processes there are; starts the engine if need be."""
    return _running().size


def get_local_rank() -> int:
    """This process's number among those on its host; starts the engine if need be."""
    return _running().local_rank


def get_local_size() -> int:
    """How many processes there are on this host; starts the engine if need be."""
    return _running().local_size


def _running() -> World:
    if not is_initialized():
        init()
    return world()
