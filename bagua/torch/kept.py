"""What an algorithm keeps from step to step, as part of the optimizer's `state_dict()`.

It is this rank's own, but for the layout of buckets: a checkpoint that one rank writes for all
brings the others nothing else, nor does one of another number of ranks. Then, which a warning
tells, it begins anew: what encoding had lost is lost, and copies of neighbors are made of the
weights there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagua.algorithms import Algorithm
from bagua.common.process_set import ProcessSet
from bagua.common.ranks_text import ranks_text
from bagua.common.together import gathered_if_any
from bagua.common.warn import warn
from bagua.common.world import world

KEY = "bagua"

_OWN = "Let every rank save and load one of its own to go on in the same bits"
_RESIZED = "Where ranks have different weights, settle() before saving for another number"


def identity(
    algorithm: Algorithm, process_set: ProcessSet, names: Sequence[str]
) -> dict[str, object]:
    """What it is of. Machines, by rank: what their ranks keep together belongs to the machine."""
    return {
        "algorithm": repr(algorithm),
        "size": process_set.size(),
        "rank": process_set.rank(),
        "machines": world().nodes(process_set) if algorithm.hierarchical else [],
        "parameters": list(names),
    }


class Loaded:
    """What a checkpoint has brought this rank, until all take theirs up or begin anew."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self._came = False  # a checkpoint, with something for us or without

    def come(self, state: dict[str, Any] | None) -> None:
        self.state, self._came = state, True

    def take(self) -> dict[str, Any] | None:
        """It is asked for no more."""
        state, self.state, self._came = self.state, None, False
        return state

    def agreed(
        self,
        mine: dict[str, object],
        name: str,
        process_set: ProcessSet,
        warns: bool = True,
        instead: str = "",
    ) -> bool | None:
        """Whether all ranks can take it up; warns if some have any and cannot.

        None if nothing came to any rank: what is kept goes on. Else it begins anew, also where a
        checkpoint came that has none of it. Its `identity` must be mine, its `layout` the same on
        all ranks. `instead` says how they begin.
        """
        state = self.state or {"identity": mine, "layout": None}
        problem, layout = _problem(state["identity"], mine), state["layout"]
        everyone = gathered_if_any((problem, layout), self._came, name, process_set)
        if everyone is None:
            everyone = [("a rank has joined already", layout)]
        if not everyone:
            return None
        if all(theirs is None for _, theirs in everyone):
            return False
        problems = [text for text, _ in everyone if text]
        have = [rank for rank, (_, it) in zip(process_set.ranks, everyone) if it is not None]
        if len(have) < len(everyone):
            problems.append(f"only {ranks_text(have)} loaded it")
        elif any(theirs != layout for _, theirs in everyone):
            problems.append("ranks have checkpoints of different steps")
        if problems and warns:
            size = process_set.size()
            resized = state["identity"].get("size", size) != size
            warn(
                "what the algorithm had kept cannot be taken up from this checkpoint and begins "
                f"anew{instead}: {problems[0]}. {_RESIZED if resized else _OWN}",
            )
        return not problems


def is_of_other_ranks(state: dict[str, Any] | None, mine: dict[str, object]) -> bool:
    """Whether what all ranks have in common of it can be taken up, whoever they were."""
    same = ("algorithm", "parameters")
    return state is not None and all(state["identity"].get(what) == mine[what] for what in same)


def _problem(theirs: dict[str, Any], mine: dict[str, object]) -> str:
    """Why what is of one is of no use to the other; empty if it is."""
    unlike = [what for what in mine if theirs.get(what, mine[what]) != mine[what]]
    if not unlike:
        return ""  # a layout is everybody's, and has no rank
    what = unlike[0]
    if what == "parameters":
        return _unlike(theirs[what], mine[what])
    if what == "size":
        return f"it is of {theirs[what]} ranks, this is one of {mine[what]}"
    return f"it is of {what} {theirs[what]}, this is {mine[what]}"


def _unlike(theirs: Any, mine: Any) -> str:
    more = [f"more parameters, as {name}" for name in theirs if name not in mine]
    fewer = [f"fewer parameters, without {name}" for name in mine if name not in theirs]
    which = next(iter(more + fewer), "the same parameters in another order")
    return f"it is of {which} (who freezes or thaws some, saves after the next zero_grad())"
