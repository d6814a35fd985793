"""A word to who has wrapped nothing: each rank learns a model of its own, and no error tells."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from bagua.common.warn import warn
from bagua.common.world import at_init, is_initialized, world

_STEPS = 20  # on end without any exchange, before anybody is told


class _Watch:
    """Is called after the steps of all optimizers, until it is settled whether ranks talk.

    Where torch's own communication has begun, they may talk by that, which nobody sees.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._exchanges = -1
        self._hook = register_optimizer_step_post_hook(self)

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if not is_initialized():
            return
        here = world()
        exchanges = here.engine.counters()["exchanges"]
        others = torch.distributed.is_available() and torch.distributed.is_initialized()
        if here.size == 1 or others or (self._steps > 0 and exchanges != self._exchanges):
            return self.end()
        self._steps, self._exchanges = self._steps + 1, exchanges
        if self._steps < _STEPS:
            return
        self.end()
        if here.rank == 0:
            warn(
                f"{type(optimizer).__name__} has taken {_STEPS} steps and {here.size} ranks have "
                "exchanged nothing between them: each trains a model of its own; wrap it, "
                "optimizer = bagua.torch.DistributedOptimizer(optimizer), or the model, "
                "model.with_bagua(...)"
            )

    def end(self) -> None:
        self._hook.remove()


_watch: _Watch | None = None  # not before init(), for an import should change nothing of torch's


def begin() -> None:
    global _watch
    if _watch is None:
        _watch = _Watch()


def somebody_wrapped() -> None:
    """When ranks exchange is their algorithm's business from now on."""
    if _watch is not None:
        _watch.end()


at_init(begin)
