"""Ranks train alone for a round of steps, then all take one step by the mean of their changes."""

from __future__ import annotations

from typing import Any

import torch

from bagua.algorithms import Exchange
from bagua.common.kinds import Urgency
from bagua.torch.between_steps import BetweenSteps, Kept, Values
from bagua.torch.pieces import land_all

# At most, if it is more than one parameter: while one piece travels the next is made ready.
_PIECE_NBYTES = 8 << 20


class Outer(BetweenSteps):
    """With common weights c, m <- b m + mean of changes, c <- c - a (mean of changes + b m).

    A change is what this rank's weights were at the begin of the round less what they are at its
    end. If it travels while the next round computes, that round goes on from what the rank has, and
    at its end starts anew from the new c less its own change: nothing that a rank has learned is
    lost or counted twice.
    """

    _skipped = "the round is undone on all ranks"
    _first_ranks = "weights and momentum"
    _launched = False

    @property
    def place(self) -> object:
        """What is common came of all rounds."""
        return super().place, self.rounds

    @property
    def drifts(self) -> bool:  # type: ignore[override]
        return self._exchange.when == "forward"

    def equal_now(self) -> bool:
        return self._exchange.when == "step" and self._due()

    def _start_over(self) -> None:
        self._common = [piece.flat.clone() for piece in self._pieces]
        self._begins = self._common  # of the round
        if self._exchange.when == "forward":
            self._begins = [piece.flat.clone() for piece in self._pieces]
        self._momentum: list[torch.Tensor] = []
        if self._exchange.outer_momentum:
            self._momentum = [torch.zeros_like(piece.flat) for piece in self._pieces]

    def stepped(self) -> None:
        super().stepped()
        if not self._due():
            return
        self.rounds += 1
        if self._spoilt.weights(self._pieces, self._step):
            self._undo_round()
        elif self._exchange.when == "forward":
            self._overlap()
        else:
            self._step_now()

    @torch.no_grad()
    def _undo_round(self) -> None:
        """All ranks go back to what they have in common."""
        if self._launched:
            self._step_together()
        for piece, common, begin in zip(self._pieces, self._common, self._begins):
            if begin is not common:
                begin.copy_(piece.held(common))
            piece.set_weights(piece.views_of(common))

    @torch.no_grad()
    def _overlap(self) -> None:
        self._begin_anew()
        for piece in self._pieces:
            piece.launch(Urgency.NOW)
        self._launched = True

    def _begin_anew(self) -> None:
        """Leaves this rank's own change in the arena.

        Where changes were under way, the round begins with new common weights less that change.
        """
        launched = self._launched
        if launched:
            self._step_together()
        for piece, common, begin in zip(self._pieces, self._common, self._begins):
            torch._foreach_sub_(piece.views_of(begin), piece.params)
            piece.flat.copy_(begin)
            if launched:
                torch.sub(common, begin, out=begin)
                begin.copy_(piece.held(begin))
                piece.set_weights(piece.views_of(begin))
            else:
                piece.copy_weights(piece.views_of(begin))

    @torch.no_grad()
    def _step_now(self) -> None:
        for piece, begin in zip(self._pieces, self._begins):
            piece.copy_weights()
            torch.sub(piece.held(begin), piece.flat, out=piece.flat)
            piece.launch(Urgency.WAITED if piece is self._pieces[-1] else Urgency.NOW)
        self._step_together()
        for piece, common in zip(self._pieces, self._common):
            piece.set_weights(piece.views_of(common))

    def _step_together(self) -> None:
        """The common weights take their step by the changes that have arrived."""
        lr, beta = self._exchange.outer_lr, self._exchange.outer_momentum
        self._launched = False
        land_all(self._pieces)
        if self._spoilt.arrived(self._pieces, self._step):
            return
        for number, (piece, common) in enumerate(zip(self._pieces, self._common)):
            common.sub_(piece.flat, alpha=lr)
            if self._momentum:
                momentum = self._momentum[number].mul_(beta).add_(piece.flat)
                common.sub_(momentum, alpha=lr * beta)

    def _piece_nbytes(self, exchange: Exchange) -> float:
        return min(super()._piece_nbytes(exchange), _PIECE_NBYTES)

    def _land(self) -> None:
        self._launched = False
        super()._land()

    @torch.no_grad()
    def _drain(self) -> None:
        """What this rank has learned since the last exchange counts in the exact average."""
        if self._launched:
            self._begin_anew()

    def _all_equal(self) -> None:
        for copies in (self._common, self._begins):
            for piece, copy in zip(self._pieces, copies):
                piece.copy_weights(piece.views_of(copy))

    def _kept(self) -> Kept:
        kept = super()._kept()
        if self._launched:  # every rank has: soon it is there
            land_all(self._pieces)
            kept["arrived"] = [piece.flat for piece in self._pieces]
        kept |= {"common": self._common, "momentum": self._momentum}
        return kept if self._begins is self._common else kept | {"begins": self._begins}

    def _lasting(self) -> Kept:
        """The momentum, and what was lost of this rank's own changes: it does not depend on where
        they lie."""
        own = {} if self._exchange.hierarchical else super()._kept()
        lost = {what: flats for what, flats in own.items() if what == "kept.0"}
        return lost | {"momentum": self._momentum}

    def _forget(self, loaded: dict[str, Any] | None) -> None:
        super()._forget(loaded)
        momentum = loaded["values"].get("momentum") if loaded else None
        if momentum:
            super()._restore({"momentum": momentum})

    def _in_common(self) -> list[torch.Tensor]:
        return self._momentum

    def _restore(self, values: Values) -> None:
        self._launched = "arrived" in values
        begins = {"begins": values["common"]} if "common" in values else {}
        super()._restore(begins | values)
