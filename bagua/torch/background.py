"""Weights are averaged in the background, while training goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from bagua.common.kinds import Urgency
from bagua.common.objects import allgather_object
from bagua.common.world import barrier
from bagua.torch.between_steps import BetweenSteps
from bagua.torch.pieces import Pairs, Piece, land_all


class Background(BetweenSteps):
    """After a step that finds a new average: x += average - what this rank had given for it."""

    resting = False  # no exchange is begun
    _next_s = 0.0
    _given: list[torch.Tensor]  # by piece, while exchanges are under way

    def stepped(self) -> None:
        super().stepped()
        if self._given:
            self._start()
            if all(piece.done() for piece in self._pieces):
                self._finish()
        elif not self.resting and self._due() and time.monotonic() >= self._next_s:
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Also goes on where an interrupt has ended it."""
        for number, piece in enumerate(self._pieces):
            if number == len(self._given):
                piece.copy_weights()
                self._given.append(piece.flat.clone())
            if not piece.launched():
                piece.launch(Urgency.NOW)

    @torch.no_grad()
    def _finish(self) -> None:
        try:
            land_all(self._pieces)
        except BaseException:
            if all(piece.done() for piece in self._pieces):  # no interrupt: there is no average
                self._given = []
            raise
        given, self._given = self._given, []
        self._next_s = time.monotonic() + self._exchange.sync_interval_ms / 1e3
        for piece, before in zip(self._pieces, given):
            piece.flat -= before
        _move([pair for piece in self._pieces for pair in zip(piece.params, piece.views)])

    def _drop(self) -> None:
        self._given = []
        super()._land()

    def _land(self) -> None:
        if self._pieces:
            self._end(self._drop)

    def _drain(self) -> None:
        self._end(self._finish)

    def load_state(self, loaded: dict[str, Any] | None, step: int) -> None:
        self._loaded, self._step, self._begun = loaded, step, False

    def _begin(self) -> None:
        self._land()
        super()._begin()

    def _build(self) -> None:
        super()._build()
        self._given = []
        name = f"{self._prefix}.{self._generation}.marker"
        self._marker = Piece(name, [("", torch.zeros(1))], self._exchange, self._process_set)

    def _piece_nbytes(self) -> float:
        return 1 << 20  # what others must wait for at most

    def _end(self, finish: Callable[[], None]) -> None:
        """Ends what is under way, on all ranks; not all may have begun it yet."""
        if self._given:
            self._start()
        barrier(self._process_set)
        # What all have begun is agreed on by now, so it is over before this is.
        self._marker.launch(Urgency.WAITED)
        self._marker.land()
        if self._given and all(piece.done() for piece in self._pieces):
            finish()
        waiting = bool(self._given)
        everyone = allgather_object(waiting, f"{self._prefix}.waiting", self._process_set)
        if any(everyone) and not waiting:
            self._start()
        if self._given:
            finish()


def _move(pairs: Pairs) -> None:
    """Adds to every parameter, and once to memory that several have."""
    memory = [param.untyped_storage().data_ptr() for param, _ in pairs]
    count = Counter(memory)
    alone = [pair for pair, whose in zip(pairs, memory) if count[whose] == 1]
    shared = [pair for pair, whose in zip(pairs, memory) if count[whose] > 1]
    if alone:
        torch._foreach_add_([param for param, _ in alone], [view for _, view in alone])
    if shared:
        goals = [view.add_(param) for param, view in shared]
        torch._foreach_copy_([param for param, _ in shared], goals)
