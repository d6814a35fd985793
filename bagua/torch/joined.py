"""What optimizers agree on when ranks have joined, and so missed what the others went on with."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from bagua.common.kinds import ReduceOp
from bagua.common.numpy_ops import allreduce
from bagua.common.objects import allgather_object
from bagua.common.process_set import ProcessSet

_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def note(optimizer: Any) -> None:
    """Its ranks may join."""
    _optimizers.add(optimizer)


def present(name: str, process_set: ProcessSet) -> list[int]:
    """The ranks of the set that have not joined."""
    here = np.arange(process_set.size()) == process_set.rank()
    here = allreduce(here.astype(np.uint8), name=name, op=ReduceOp.Max, process_set=process_set)
    return [rank for rank, is_here in zip(process_set.ranks, here) if is_here]


def meet(process_set: ProcessSet) -> None:
    """All its ranks have joined: those that did early go to where the last one is."""
    if process_set.size() == 1:
        return
    optimizers, places = {}, {}
    for optimizer in list(_optimizers):
        if (found := optimizer.place(process_set)) is not None:
            number, place = found
            optimizers[number], places[number] = optimizer, place
    everyone = allgather_object(places, "join.optimizers", process_set)
    # What is gone, or withdrawn, on any rank is of no use to the others.
    for number in sorted(set(places).intersection(*everyone)):
        optimizers[number].meet([theirs[number] for theirs in everyone])
