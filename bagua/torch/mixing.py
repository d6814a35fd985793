"""Weights become averages over peers: after a step, or while the next one computes."""

from __future__ import annotations

import contextlib
import math

import torch

from bagua.algorithms import Exchange
from bagua.common.errors import BaguaError
from bagua.common.kinds import Urgency
from bagua.common.warn import warn
from bagua.common.world import world
from bagua.torch.between_steps import BetweenSteps, Kept
from bagua.torch.pieces import land_all


class Mixing(BetweenSteps):
    """See the module. What travels during forward and backward is used before the next step.

    A rank that mirrors its neighbors has its own new weights before it has heard of theirs, which
    it needs after the next step only.
    """

    drifts = True
    _mixed = False  # since the last step
    _under_way = False
    _versions = 0  # of the weights that travel

    @property
    def place(self) -> object:
        """Who has an average under way, or has used it, waits for nobody's."""
        return super().place, self._under_way, self._mixed

    def synchronize(self) -> None:
        super().synchronize()
        if self._exchange.when == "forward" and self._due() and not self._mixed:
            if not self._under_way:
                self._start(Urgency.WAITED)
            self._finish()

    def stepped(self) -> None:
        super().stepped()
        self._mixed = False
        if not self._due():
            return
        if self._spoilt.weights(self._pieces, self._step):
            self._mixed = True
            return
        if self._exchange.when == "forward":
            return self._start(Urgency.NOW)
        try:
            self._start(Urgency.NOW if self._settles_early() else Urgency.WAITED)
            self._finish()
        except BaguaError:
            with contextlib.suppress(BaguaError):
                land_all(self._pieces)  # nothing moves weights any more
            raise

    @torch.no_grad()
    def _start(self, urgency: Urgency) -> None:
        land_all(self._pieces)
        for piece in self._pieces:
            piece.launch_weights(urgency)
        self._versions = self._count_versions()
        self._under_way = True

    @torch.no_grad()
    def _finish(self) -> None:
        untouched = self._versions == self._count_versions()
        self._under_way, self._mixed = False, True
        self.rounds += 1  # what a checkpoint finds under way begins once more
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

    def _land(self) -> None:
        self._under_way = False
        super()._land()

    def _drain(self) -> None:
        if self._under_way:
            self._finish()
        super()._drain()

    def _settles_early(self) -> bool:
        """Whether this rank alone encodes its values, and so has its new ones at once."""
        return self._encodes_alone(self._exchange)

    def _encodes_alone(self, exchange: Exchange) -> bool:
        # Of most nothing is encoded, and nobody has to be counted.
        return bool(exchange.mirrors) and world().encodes_alone(
            exchange.hierarchical, self._process_set
        )

    def _piece_nbytes(self, exchange: Exchange) -> float:
        # In shared memory the next piece would wait for the neighbors of this one.
        alone = self._encodes_alone(exchange)
        return math.inf if alone else super()._piece_nbytes(exchange)

    def _kept(self) -> Kept:
        if self._exchange.mirrors:
            land_all(self._pieces)
        return super()._kept()

    def _all_equal(self) -> None:
        for piece in self._pieces:
            for copies in piece.kept:
                piece.copy_weights(piece.views_of(copies))
