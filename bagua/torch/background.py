"""Weights are averaged in the background, while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from bagua.algorithms import Exchange
from bagua.common.errors import LeftError
from bagua.common.kinds import Urgency
from bagua.common.objects import allgather_object
from bagua.common.warn import warn
from bagua.torch.between_steps import BetweenSteps
from bagua.torch.pieces import Pairs, Piece, land_all, raise_first


class Background(BetweenSteps):
    """After a step that finds a new average: x += average - what this rank had given for it."""

    alone = True
    _next_s = 0.0
    _may_be_under_way = False  # some rank's exchange; the same on all ranks
    _given: list[torch.Tensor]  # by piece, while exchanges are under way

    def stepped(self) -> None:
        super().stepped()
        if self._given:
            # On a GPU it may be done for the engine while the device has yet to do it, when the
            # slowest rank's has come so far.
            if all(piece.reached() for piece in self._pieces):
                self._finish()
        elif not self.resting and self._due() and time.monotonic() >= self._next_s:
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        self._spoilt.leaves(self._pieces, self._step)
        for piece in self._pieces:
            piece.copy_weights()
            self._given.append(piece.flat.clone())
            piece.launch(Urgency.NOW)

    @torch.no_grad()
    def _finish(self) -> None:
        given, self._given = self._given, []
        try:
            land_all(self._pieces)
        except LeftError as error:  # who ends without settle() holds up nobody
            self.resting = True
            warn(
                f"step {self._step}: weights are not averaged any more, and this rank trains on by "
                f"itself: {error}. settle() on every rank after its last step would wait for all"
            )
            return
        self._next_s = time.monotonic() + self._exchange.sync_interval_ms / 1e3
        if self._spoilt.arrived(self._pieces, self._step):
            return
        for piece, before in zip(self._pieces, given):
            piece.flat -= before
        _move([pair for piece in self._pieces for pair in zip(piece.params, piece.views)])

    def _layout(self) -> tuple[int, int]:
        return 0, 0  # each rank is at a step of its own

    def _drop(self) -> None:
        self._given = []
        super()._land()

    def part(self) -> None:
        self._drop()  # all have taken part in it, if only with zeros

    def _land(self) -> None:
        self._end(self._drop)

    def _drain(self) -> None:
        self._end(self._finish)

    def load_state(self, loaded: dict[str, Any] | None, step: int) -> None:
        self._expect(loaded, step)  # what is under way ends when all begin anew

    def _begin(self) -> None:
        self._land()
        super()._begin()
        self._may_be_under_way = True

    def _start_over(self) -> None:
        self._given, self._may_be_under_way = [], False
        name = self.standing.name(f"weights.{self._generation}.marker")
        self._marker = Piece(name, [("", torch.zeros(1))], self._exchange, self._process_set)

    def _piece_nbytes(self, exchange: Exchange) -> float:
        return 1 << 20  # what others must wait for at most

    def _end(self, finish: Callable[[], None]) -> None:
        """Ends what is under way, on all ranks; not all may have begun it yet."""
        if not self._may_be_under_way:
            return
        allgather_object(None, self.standing.name("end"), self._process_set)
        # What all have begun is agreed on by now, so it is over before this is.
        self._marker.launch(Urgency.WAITED)
        self._marker.land()
        failed: list[Exception] = []
        if self._given and all(piece.done() for piece in self._pieces):
            try:
                finish()
            except Exception as error:
                failed.append(error)  # the others wait for this rank's word
        waiting = bool(self._given)
        everyone = allgather_object(waiting, self.standing.name("waiting"), self._process_set)
        if any(everyone) and not waiting:
            self._start()
        if self._given:
            finish()
        if failed:
            raise_first(failed)


def _move(pairs: Pairs) -> None:
    """Adds to every parameter, and once to memory that several have."""
    overlap = _overlapping([param for param, _ in pairs])
    alone = [pair for number, pair in enumerate(pairs) if number not in overlap]
    shared = [pair for number, pair in enumerate(pairs) if number in overlap]
    if alone:
        torch._foreach_add_([param for param, _ in alone], [view for _, view in alone])
    if shared:
        goals = [view.add_(param) for param, view in shared]
        torch._foreach_copy_([param for param, _ in shared], goals)


def _overlapping(params: list[torch.Tensor]) -> set[int]:
    """Those whose memory, gaps included, is in part another one's, too."""
    found, last, end = set(), -1, 0
    for number in sorted(range(len(params)), key=lambda number: params[number].data_ptr()):
        param = params[number]
        if param.numel() == 0:
            continue
        if param.data_ptr() < end:
            found |= {number, last}
        reach = sum((n - 1) * stride for n, stride in zip(param.shape, param.stride()))
        if (its_end := param.data_ptr() + (reach + 1) * param.element_size()) > end:
            last, end = number, its_end
    return found
