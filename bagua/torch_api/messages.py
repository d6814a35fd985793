"""`send` and `recv`: a tensor from one rank to another, while the others go on."""

from __future__ import annotations

from typing import Any

import torch

from bagua.common.world import world
from bagua.torch.arrays import TorchArrays
from bagua.torch_api.process_group import Communicator, own_process_set, world_rank

_arrays = TorchArrays()


def send(tensor: torch.Tensor, dst: int, comm: Communicator = None) -> None:
    """Sends `tensor` to rank `dst`; returns when it may be changed.

    A large one is waited with until `dst` receives, so two ranks must not both send first.
    """
    if ranks := own_process_set(comm):
        data, dtype = _bytes(tensor)
        world().messages.send(data, dtype, world_rank(ranks, dst), ranks._id())


def recv(tensor: torch.Tensor, src: int, comm: Communicator = None) -> None:
    """Fills `tensor` with the next one that rank `src` sends here, of equal type and size."""
    if ranks := own_process_set(comm):
        target = tensor.detach()
        filled = _arrays.contiguous(target).cpu()
        data, dtype = _bytes(filled)
        world().messages.receive(data, dtype, world_rank(ranks, src), ranks._id())
        if filled is not target:
            target.copy_(filled)


def _bytes(tensor: torch.Tensor) -> tuple[Any, int]:
    """A tensor's memory, or that of a copy on the host without gaps, and the number of its type."""
    whole = _arrays.contiguous(tensor).cpu()
    _, dtype, _ = _arrays.describe(whole)
    return whole.detach().view(-1).view(torch.uint8).numpy(), dtype
