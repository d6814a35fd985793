"""Momentum that each rank keeps of its own gradients, before they are averaged."""

from __future__ import annotations

import torch

from bagua.algorithms import Exchange
from bagua.common.process_set import ProcessSet
from bagua.common.world import world
from bagua.torch.buckets import Bucket
from bagua.torch.slot import view_like


class VelocityBucket(Bucket):
    """u <- momentum u + gradient; u travels, so that what a codec holds back has its momentum, too.

    Of each slot u is kept in front of what the engine keeps. Where all of a value has travelled, u
    begins anew: it would be out of date. Ranks that share a machine, if that is exact, do not know
    what has travelled of theirs, and keep u.
    """

    transforms = True

    def _prepare(self, exchange: Exchange, process_set: ProcessSet) -> None:
        self._momentum = exchange.momentum_correction
        whole = exchange.codec == "topk" and exchange.values == "raw"
        encodes = world().encodes_alone(exchange.hierarchical, process_set)
        self._sees_what_went = whole and encodes and process_set.size() > 1
        self._moved: list[torch.Tensor] = []  # what u becomes when this exchange is delivered
        for slot in self.slots:
            slot.residuals.insert(0, torch.zeros_like(slot.view))
            self._moved.append(torch.zeros_like(slot.view))
        self.own_residuals += 1

    def _transform(self) -> None:
        for slot, moved in zip(self.slots, self._moved):
            torch.add(slot.view, slot.residuals[0], alpha=self._momentum, out=moved)
            slot.view.copy_(moved)

    def deliver(self) -> None:
        under_way = self.handle is not None
        super().deliver()
        if not under_way:
            return
        with torch.no_grad():
            for slot, moved in zip(self.slots, self._moved):
                velocity, *lost = slot.residuals
                # A NaN or an Inf is told once, not for ever.
                velocity.copy_(moved).nan_to_num_(0.0, 0.0, 0.0)
                if self._sees_what_went and lost:
                    held_back = view_like(lost[0], slot.param) != 0
                    velocity.mul_(held_back.to(velocity.device))
