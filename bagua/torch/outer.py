"""Ranks train alone for a round of steps, then all take one step by the mean of their changes."""

from __future__ import annotations

import torch

from bagua.common.kinds import Urgency
from bagua.torch.between_steps import BetweenSteps
from bagua.torch.pieces import Piece, land_all


class Outer(BetweenSteps):
    """With common weights c, m <- b m + mean of changes, c <- c - a (mean of changes + b m).

    A change is what this rank's weights were at the begin of the round less what they are at its
    end. If it travels while the next round computes, that round goes on from what the rank has, and
    at its end starts anew from the new c less its own change: nothing that a rank has learned is
    lost or counted twice.
    """

    _launched = False

    def _build(self) -> None:
        super()._build()
        self._common = [piece.flat.clone() for piece in self._pieces]
        self._begins = [piece.flat.clone() for piece in self._pieces]  # of the round
        self._momentum = [torch.zeros_like(piece.flat) for piece in self._pieces]

    def stepped(self) -> None:
        super().stepped()
        if not self._due():
            return
        if self._exchange.when == "forward":
            self._overlap()
        else:
            self._start()
            self._finish()

    @torch.no_grad()
    def _overlap(self) -> None:
        changes = [self._change(piece, begin) for piece, begin in zip(self._pieces, self._begins)]
        if self._launched:
            self._step_together()
            for piece, common, change in zip(self._pieces, self._common, changes):
                piece.set_weights(piece.views_of(common - change))
        for piece, begin, change in zip(self._pieces, self._begins, changes):
            piece.copy_weights(piece.views_of(begin))
            piece.flat.copy_(change)
            piece.launch(Urgency.NOW)
        self._launched = True
        self._rounds += 1

    @torch.no_grad()
    def _start(self) -> None:
        for piece, begin in zip(self._pieces, self._begins):
            piece.flat.copy_(self._change(piece, begin))
            piece.launch(Urgency.WAITED)
        self._rounds += 1

    @torch.no_grad()
    def _finish(self) -> None:
        self._step_together()
        for piece, common, begin in zip(self._pieces, self._common, self._begins):
            piece.set_weights(piece.views_of(common))
            begin.copy_(common)

    @staticmethod
    def _change(piece: Piece, begin: torch.Tensor) -> torch.Tensor:
        now = torch.zeros_like(begin)
        piece.copy_weights(piece.views_of(now))
        return begin - now

    def _step_together(self) -> None:
        lr, beta = self._exchange.outer_lr, self._exchange.outer_momentum
        self._launched = False
        land_all(self._pieces)
        for piece, common, momentum in zip(self._pieces, self._common, self._momentum):
            momentum.mul_(beta).add_(piece.flat)
            common.sub_(piece.flat, alpha=lr).sub_(momentum, alpha=lr * beta)

    def _land(self) -> None:
        self._launched = False
        super()._land()

    @torch.no_grad()
    def _drain(self) -> None:
        """What this rank has learned since the last exchange counts in the exact average."""
        if not self._launched:
            return
        changes = [self._change(piece, begin) for piece, begin in zip(self._pieces, self._begins)]
        self._step_together()
        for piece, common, change in zip(self._pieces, self._common, changes):
            piece.set_weights(piece.views_of(common - change))

    def _all_equal(self) -> None:
        for piece, common, begin in zip(self._pieces, self._common, self._begins):
            for copy in (common, begin):
                piece.copy_weights(piece.views_of(copy))

    def _kept(self) -> dict[str, list[torch.Tensor]]:
        kept = super()._kept()
        if self._launched:  # every rank has: soon it is there
            land_all(self._pieces)
            kept["arrived"] = [piece.flat for piece in self._pieces]
        return kept | {"common": self._common, "begins": self._begins, "momentum": self._momentum}

    def _restore(self, values: dict[str, dict[str, torch.Tensor]]) -> None:
        self._launched = "arrived" in values
        super()._restore(values)
