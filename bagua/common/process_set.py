"""Process sets: some ranks of the world that talk among themselves."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from bagua.common.errors import UsageError


class ProcessSet:
    """Ranks of the world, in ascending order; usable once it has been added.

    >>> ProcessSet([2, 0]).ranks
    [0, 2]
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        try:
            self.ranks: list[int] = sorted(operator.index(rank) for rank in ranks)
        except TypeError:
            raise UsageError(f"a process set is made of ranks, not of {ranks!r}") from None
        self.process_set_id: int | None = None
        self._my_rank: int = -1
        for low, high in zip(self.ranks, self.ranks[1:]):
            if low == high:
                raise UsageError(f"process set {self.ranks} names rank {low} twice")

    def _bind(self, process_set_id: int | None, world_rank: int) -> None:
        self.process_set_id = process_set_id
        self._my_rank = self.ranks.index(world_rank) if world_rank in self.ranks else -1

    def included(self) -> bool:
        """Whether this process is in the set."""
        self._id()
        return self._my_rank >= 0

    def rank(self) -> int:
        """This process's place in the set."""
        self._id()
        if self._my_rank < 0:
            raise UsageError(f"this rank is not in process set {self.ranks}")
        return self._my_rank

    def size(self) -> int:
        self._id()
        return len(self.ranks)

    def _id(self) -> int:
        if self.process_set_id is None:
            raise UsageError(
                f"process set {self.ranks} is not in use: add it with add_process_set() or "
                "init(process_sets=...)"
            )
        return self.process_set_id

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def checked(process_set: Any) -> ProcessSet:
    """It, if it is a process set."""
    if not isinstance(process_set, ProcessSet):
        raise UsageError(
            f"process_set={process_set!r} is none; give a ProcessSet that was added, or leave it "
            "out for all ranks"
        )
    return process_set


class _GlobalProcessSet(ProcessSet):
    """The world; bound anew by every init."""

    def __init__(self) -> None:
        super().__init__([])

    def _id(self) -> int:
        if self.process_set_id is None:
            raise UsageError("bagua is not initialized; call init() first")
        return self.process_set_id


global_process_set: ProcessSet = _GlobalProcessSet()
