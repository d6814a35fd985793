"""Weights that are no numbers, where they travel: told by rank, and kept from the others.

By `check_finite`: all modes but `off` tell; `skip` leaves out what is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.common.kinds import Max
from bagua.common.warn import warn
from bagua.common.world import world
from bagua.torch import ops
from bagua.torch.pieces import Named, Piece
from bagua.torch.safety import NonFinite, first_not_finite, first_odd, looks_at_all, spoils
from bagua.torch.standing import Standing


class Spoilt:
    """Of one optimizer, on this rank; `skipped` says what all ranks do instead."""

    def __init__(self, standing: Standing, skipped: str) -> None:
        self._standing = standing
        self._process_set = standing.process_set
        self._skipped = skipped
        self._watch = None
        if looks_at_all():
            self._watch = NonFinite(standing.process_set, standing.name("finite"))

    def gradients(self, named: Named, step: int) -> bool:
        """Whether this rank does not step, and what they would have spoilt stays with it."""
        if not looks_at_all():
            return False
        found = first_not_finite(named)
        skips = bool(found) and world().config.check_finite == "skip"
        if found:
            skipped = "; this rank keeps its weights" if skips else ""
            self._warn(step, f"{found} on rank {world().rank}{skipped}")
        return skips

    def weights(self, pieces: Sequence[Piece], step: int) -> bool:
        """Whether those of any rank are, and all ranks skip the exchange therefore."""
        if self._watch is None:
            return False
        for piece in pieces:
            self._watch.look_at_values(piece.name, zip(piece.names, piece.params))
        return self._tell(self._watch.agreed(), step)

    def arrived(self, pieces: Sequence[Piece], step: int) -> bool:
        """The same of what has arrived, where that is the same on all ranks."""
        if self._watch is None:
            return False
        bad = [(piece.name, first_odd(zip(piece.names, piece.views))) for piece in pieces]
        found = [f"{name} ({where}) after its exchange" for where, name in bad if name]
        return self._tell(", ".join(found[:4]), step)

    def leaves(self, pieces: Sequence[Piece], step: int) -> None:
        """Tells of weights that leave where nobody can be asked, since all are at other steps."""
        for piece in pieces if self._watch is not None else ():
            if name := first_odd(zip(piece.names, piece.params)):
                where = f"{name} ({piece.name}) on rank {world().rank}"
                self._warn(step, f"{where}, which is about to be averaged")

    def left_out(self, named: Named, step: int) -> bool:
        """Whether this rank's weights do not count in an exact average.

        Where nobody's are numbers all count.
        """
        found, finite = "", world().config.check_finite
        if finite != "off":
            found = first_odd(named)
        skips = finite == "skip" and self._anybodys_are_numbers(not found)
        if found:
            left = "; that rank is left out" if skips else "; check_finite=skip leaves it out"
            where = f"{found} on rank {world().rank}"
            self._warn(step, f"{where}, when all weights are averaged{left}")
        return skips and bool(found)

    def _anybodys_are_numbers(self, mine_are: bool) -> bool:
        flag, name = torch.tensor([mine_are], dtype=torch.uint8), self._standing.name("numbers")
        return bool(ops.allreduce(flag, name=name, op=Max, process_set=self._process_set))

    def _tell(self, found: str, step: int) -> bool:
        return spoils(found, step, self._process_set, self._skipped)

    @staticmethod
    def _warn(step: int, where: str) -> None:
        warn(f"step {step}: NaN or Inf in {where}")
