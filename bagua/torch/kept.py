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
from bagua.common.together import gathered_if_any
from bagua.common.warn import warn
from bagua.common.world import world

KEY = "bagua"


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


def agrees(
    state: dict[str, Any] | None,
    came: bool,
    mine: dict[str, object],
    name: str,
    process_set: ProcessSet,
    warns: bool = True,
    instead: str = "",
) -> bool | None:
    """Whether all ranks can take up what they have loaded; warns if some have and cannot.

    None if nothing `came` on any rank: what is kept goes on. Else it begins anew, also where a
    checkpoint came that has none of it. Its `identity` must be mine, its `layout` the same on all
    ranks. `instead` says how they begin.
    """
    problem, layout = "", None
    if state is not None:
        for what, value in mine.items():
            theirs = state["identity"].get(what, value)  # a layout is everybody's
            if theirs == value or problem:
                continue
            problem = f"it is of {what} {theirs}, this is {value}"
            if what == "parameters":
                problem = _unlike(theirs, value)
            elif what == "size":
                problem = f"it is of {theirs} ranks, this is one of {value}"
        layout = state["layout"]
    everyone = gathered_if_any((problem, layout), came, name, process_set)
    if everyone is None:
        everyone = [("a rank has joined already", layout)]
    if not everyone:
        return None
    if all(theirs is None for _, theirs in everyone):
        return False
    problems = [text for text, _ in everyone if text]
    size = process_set.size()
    resized = state is not None and state["identity"].get("size", size) != size
    remedy = "Let every rank save and load one of its own to go on in the same bits"
    if resized:
        remedy = "Where ranks have different weights, settle() before saving for another number"
    if any(theirs != layout for _, theirs in everyone):
        problems.append("ranks have checkpoints of different steps, or none")
    if problems and warns:
        warn(
            "what the algorithm had kept cannot be taken up from this checkpoint and begins anew"
            f"{instead}: {problems[0]}. {remedy}",
        )
    return not problems


def is_of_other_ranks(state: dict[str, Any] | None, mine: dict[str, object]) -> bool:
    """Whether what all ranks have in common of it can be taken up, whoever they were."""
    same = ("algorithm", "parameters")
    return state is not None and all(state["identity"].get(what) == mine[what] for what in same)


def _unlike(theirs: Any, mine: Any) -> str:
    more = [f"more parameters, as {name}" for name in theirs if name not in mine]
    fewer = [f"fewer parameters, without {name}" for name in mine if name not in theirs]
    which = next(iter(more + fewer), "the same parameters in another order")
    return f"it is of {which} (who freezes or thaws some, saves after the next zero_grad())"
