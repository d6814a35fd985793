"""Weights become averages over peers: after a step, or while the next one computes."""

from __future__ import annotations

import math

import torch

from bagua.common.kinds import Urgency
from bagua.common.warn import warn
from bagua.common.world import world
from bagua.torch.between_steps import BetweenSteps, Kept
from bagua.torch.pieces import land_all, launch_until


class Mixing(BetweenSteps):
    """See the module. What travels during forward and backward is used before the next step.

    A rank that mirrors its neighbors has its own new weights before it has heard of theirs, which
    it needs after the next step only.
    """

    drifts = True
    _mixed = False  # since the last step
    _rounds_due = 0  # in which every piece is launched once; so many of them
    _rounds_begun = 0  # with all pieces, though the last may be one that an interrupt has left
    _rounds_ended = 0
    _versions = 0  # of the weights that travel

    def synchronize(self) -> None:
        super().synchronize()
        if self._exchange.when == "forward" and self._due() and not self._mixed:
            if self._rounds_due == self._rounds_ended:  # else it is under way
                self._rounds_due += 1
            self._start(Urgency.WAITED)
            self._finish()

    def stepped(self) -> None:
        super().stepped()
        self._mixed = False
        if not self._due():
            return
        if self._is_spoilt():
            self._mixed = True
            return
        self._rounds_due += 1
        if self._exchange.when == "forward":
            return self._start(Urgency.NOW)
        try:
            self._start(Urgency.NOW if self._settles_early() else Urgency.WAITED)
            self._finish()
        except BaseException:
            for piece in self._pieces:
                piece.leave_weights()
            raise

    @torch.no_grad()
    def _start(self, urgency: Urgency) -> None:
        if self._rounds_begun == self._rounds_due:
            return
        land_all(self._pieces)
        self._launch(urgency)
        self._versions = self._count_versions()
        self._rounds_begun = self._rounds_due

    def _launch(self, urgency: Urgency) -> None:
        launch_until(self._rounds_due, self._pieces, lambda _, piece: piece.launch_weights(urgency))

    @torch.no_grad()
    def _finish(self) -> None:
        untouched = self._versions == self._count_versions()
        self._rounds_ended, self._mixed = self._rounds_due, True
        self._rounds += 1  # what a checkpoint finds under way begins once more
        if self._settles_early():
            for piece in self._pieces:
                piece.land_values()
        else:
            land_all(self._pieces)
        for piece in self._pieces if untouched else ():
            piece.take_weights()
        if not untouched:
            warn(
                "weights were changed while their average travelled, which is given up; with "
                "when='step' they may be changed between steps",
            )

    def _count_versions(self) -> int:
        return sum(param._version for piece in self._pieces for param in piece.params)

    @torch.no_grad()
    def _land(self) -> None:
        self._launch(Urgency.NOW)  # what an interrupt has left out, and others wait for
        self._rounds_begun = self._rounds_ended = self._rounds_due
        super()._land()

    def _drain(self) -> None:
        if self._rounds_ended < self._rounds_begun == self._rounds_due:
            self._finish()
        super()._drain()

    def _build(self) -> None:
        super()._build()
        self._rounds_due = self._rounds_begun = self._rounds_ended = 0

    def _settles_early(self) -> bool:
        """Whether this rank alone encodes its values, and so has its new ones at once."""
        if not self._exchange.mirrors:
            return False
        anywhere = world().engine.exchanges_anywhere(self._process_set._id())
        return not self._exchange.hierarchical or anywhere

    def _piece_nbytes(self) -> float:
        # The next piece would wait for the neighbors of this one.
        return math.inf if self._settles_early() else super()._piece_nbytes()

    def _kept(self) -> Kept:
        if self._exchange.mirrors:
            land_all(self._pieces)
        return super()._kept()

    def _all_equal(self) -> None:
        for piece in self._pieces:
            for copies in piece.kept:
                piece.copy_weights(piece.views_of(copies))
