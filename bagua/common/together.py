"""What fails on one rank is an error on all: none goes on, and waits for one that does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from bagua.common.errors import BaguaError, JoinedError, UsageError
from bagua.common.kinds import Kind, ReduceOp
from bagua.common.numpy_ops import allreduce
from bagua.common.objects import allgather_object
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.common.requests import refuse_quietly


@contextlib.contextmanager
def together(
    what: str, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Iterator[None]:
    """For what each rank does by itself. Costs a byte where it fails nowhere."""
    failed = None
    try:
        yield
    except Exception as error:
        failed = error
    mine = "" if failed is None else f"{type(failed).__name__}: {failed}"
    everyone: list[str] | None = []
    try:
        everyone = gathered_if_any(mine, bool(mine), name, process_set)
    except BaguaError:
        if failed is None:
            raise
    if failed is not None:
        raise failed
    if everyone is None:
        raise UsageError(f"{what} fails on a rank, which says why; others have joined")
    for rank, text in zip(process_set.ranks, everyone):
        if text:
            raise UsageError(f"{what} fails on rank {rank}: {text}")


def gathered_if_any(
    mine: Any, has: bool, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any] | None:
    """Every rank's, in rank order, if any has something to say; else nothing, at a byte's cost.

    Ranks that have joined take part in the question. They say nothing, and then nobody can: None.
    """
    flag = np.array([has], np.uint8)
    flag = allreduce(flag, name=_question(name), op=ReduceOp.Max, process_set=process_set)
    if not flag[0]:
        return []
    try:
        return allgather_object(mine, name, process_set)
    except JoinedError:
        return None


def refuse(name: str, process_set: ProcessSet, problem: str) -> None:
    """Other ranks that come to `gathered_if_any` hear why this one does not."""
    refuse_quietly(Kind.ALLREDUCE, _question(name), process_set, problem)


def _question(name: str | None) -> Any:
    return name and f"{name}.any"
