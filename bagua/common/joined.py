"""`join`, and what optimizers agree on after it, since some have missed what others went on with.

Optimizers are not of this layer, which asks any that is noted for its `place` and has it `meet`.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import numpy as np

from bagua.common.errors import LeftError
from bagua.common.kinds import Kind, ReduceOp
from bagua.common.numpy_ops import allreduce
from bagua.common.process_set import ProcessSet, checked, global_process_set
from bagua.common.together import gathered_if_any
from bagua.common.world import world

_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def join(process_set: ProcessSet = global_process_set) -> int:
    """Takes part in the others' operations with zeros until every rank has joined.

    Returns the last rank that did: the one that trained on the most batches.
    """
    last = int(world().request(Kind.JOIN, set=checked(process_set)._id()).value)
    with contextlib.suppress(LeftError):  # no optimizer trains on with a rank that has shut down
        _meet(process_set)
    return last


def note(optimizer: Any) -> None:
    """Its ranks may join."""
    _optimizers.add(optimizer)


def present(name: str, process_set: ProcessSet) -> list[int]:
    """The ranks of the set that have not joined."""
    here = np.arange(process_set.size()) == process_set.rank()
    here = allreduce(here.astype(np.uint8), name=name, op=ReduceOp.Max, process_set=process_set)
    return [rank for rank, is_here in zip(process_set.ranks, here) if is_here]


def _meet(process_set: ProcessSet) -> None:
    """All its ranks have joined: those that did early go to where the last one is."""
    if process_set.size() == 1:
        return
    optimizers, places = {}, {}
    for optimizer in list(_optimizers):
        if (found := optimizer.place(process_set)) is not None:
            number, place = found
            optimizers[number], places[number] = optimizer, place
    # Also a rank that has no optimizer answers, or not even torch.
    everyone = gathered_if_any(places, bool(places), "join.optimizers", process_set) or [{}]
    # What is gone, or withdrawn, on any rank is of no use to the others.
    for number in sorted(set(places).intersection(*everyone)):
        optimizers[number].meet([theirs[number] for theirs in everyone])
