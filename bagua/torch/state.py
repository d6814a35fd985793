"""What an algorithm keeps from step to step, as part of the optimizer's `state_dict()`.

It is this rank's own: a checkpoint that one rank writes for all brings the others nothing, nor does
one of another number of ranks. Then, which a warning tells, they begin anew: what encoding had lost
is lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from bagua.common.process_set import ProcessSet
from bagua.torch.buckets import Slot

KEY = "bagua"


def saved(
    slots: list[Slot], algorithm: str, process_set: ProcessSet, learned: bool
) -> dict[str, Any] | None:
    """For each parameter in the order of the buckets what was lost; None if nothing is kept."""
    if not any(slot.residuals for slot in slots):
        return None
    return {
        "algorithm": algorithm,
        "rank": process_set.rank(),
        "size": process_set.size(),
        "learned": learned,
        "lost": {slot.name: [lost.clone() for lost in slot.residuals] for slot in slots},
    }


def why_not(
    state: Mapping[str, Any], slots: list[Slot], algorithm: str, process_set: ProcessSet
) -> str | None:
    """Why a state cannot be taken up; None if it can."""
    mine = {"algorithm": algorithm, "rank": process_set.rank(), "size": process_set.size()}
    for what, value in mine.items():
        if state[what] != value:
            return f"it is of {what} {state[what]}, this is {value}"
    if set(state["lost"]) != {slot.name for slot in slots}:
        return "it is of other parameters"
    return None


def restore(state: Mapping[str, Any], slots: list[Slot]) -> None:
    for slot in slots:
        for now, before in zip(slot.residuals, state["lost"][slot.name]):
            now.copy_(before)


def warn(problem: str) -> None:
    warnings.warn(
        f"what the algorithm kept is not in this checkpoint, and begins anew: {problem}. Let every "
        "rank save and load a checkpoint of its own to go on without a difference",
        stacklevel=4,
    )
