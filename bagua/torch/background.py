"""Weights are averaged in the background, while training goes on."""

from __future__ import annotations

import time
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
    _given: list[torch.Tensor]  # by piece, while an exchange is under way

    def stepped(self) -> None:
        super().stepped()
        if self._given:
            if all(piece.done() for piece in self._pieces):
                self._finish()
        elif not self.resting and self._due() and time.monotonic() >= self._next_s:
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        for piece in self._pieces:
            piece.copy_weights()
            self._given.append(piece.flat.clone())
            piece.launch(Urgency.NOW)

    @torch.no_grad()
    def _finish(self) -> None:
        given, self._given = self._given, []
        land_all(self._pieces)
        self._next_s = time.monotonic() + self._exchange.sync_interval_ms / 1e3
        for piece, before in zip(self._pieces, given):
            piece.flat -= before
        moves = _each_once([p for piece in self._pieces for p in zip(piece.params, piece.views)])
        torch._foreach_add_([param for param, _ in moves], [view for _, view in moves])

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


def _each_once(pairs: Pairs) -> Pairs:
    """Parameters may share memory: of each, what no other one before it has."""
    once, end = [], 0
    for param, view in sorted(pairs, key=lambda pair: (pair[0].data_ptr(), -pair[0].nbytes)):
        begin = param.data_ptr()
        shared = max(0, end - begin) // param.element_size()
        end = max(end, begin + param.nbytes)
        if shared == 0:
            once.append((param, view))
        elif shared < param.numel() and param.is_contiguous():
            once.append((param.view(-1)[shared:], view.reshape(-1)[shared:]))
    return once
