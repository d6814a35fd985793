"""What an algorithm keeps from step to step, as part of the optimizer's `state_dict()`.

It is this rank's own: a checkpoint that one rank writes for all brings the others nothing, nor does
one of another number of ranks. Then, which a warning tells, it begins anew: what encoding had lost
is lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from bagua.algorithms import Algorithm
from bagua.common.objects import allgather_object
from bagua.common.process_set import ProcessSet
from bagua.torch.buckets import Bucket

KEY = "bagua"


def keeps_something(buckets: Sequence[Bucket]) -> bool:
    return any(slot.residuals for bucket in buckets for slot in bucket.slots)


def saved(
    buckets: Sequence[Bucket],
    algorithm: Algorithm,
    process_set: ProcessSet,
    step: int,
    learned: bool,
) -> dict[str, Any]:
    """How the buckets lie, and what was lost of each parameter."""
    slots = [slot for bucket in buckets for slot in bucket.slots]
    return {
        "algorithm": repr(algorithm),
        "rank": process_set.rank(),
        "size": process_set.size(),
        "step": step,
        "learned": learned,
        "buckets": [[slot.name for slot in bucket.slots] for bucket in buckets],
        "lost": {slot.name: [lost.clone() for lost in slot.residuals] for slot in slots},
    }


def agrees(
    state: dict[str, Any] | None,
    buckets: Sequence[Bucket],
    algorithm: Algorithm,
    process_set: ProcessSet,
    name: str,
) -> bool:
    """Whether all ranks can take up what they have loaded; warns if some have and cannot."""
    problem, layout = "", None
    if state is not None:
        mine = {
            "algorithm": repr(algorithm),
            "rank": process_set.rank(),
            "size": process_set.size(),
        }
        for what, value in mine.items():
            if state[what] != value:
                problem = f"it is of {what} {state[what]}, this is {value}"
        names = sorted(slot.name for bucket in buckets for slot in bucket.slots)
        if sorted(state["lost"]) != names:
            problem = "it is of other parameters"
        layout = (state["step"], state["learned"], state["buckets"])
    everyone = allgather_object((problem, layout), name, process_set)
    if not any(theirs for _, theirs in everyone):
        return False
    problems = [text for text, _ in everyone if text]
    if any(theirs != layout for _, theirs in everyone):
        problems.append("ranks have checkpoints of different steps, or none")
    if problems:
        warnings.warn(
            "what the algorithm had kept cannot be taken up from this checkpoint and begins anew: "
            f"{problems[0]}. Let every rank save and load one of its own to go on in the same bits",
            stacklevel=2,
        )
    return not problems


def restore(state: dict[str, Any] | None, buckets: Sequence[Bucket]) -> None:
    """Makes it what is kept now; None forgets everything."""
    for bucket in buckets:
        for slot in bucket.slots:
            for i, lost in enumerate(slot.residuals):
                if state is None:
                    lost.zero_()
                else:
                    lost.copy_(state["lost"][slot.name][i])
