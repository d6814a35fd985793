"""Process groups: some ranks that talk among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Union

import torch

from bagua.common.errors import UsageError
from bagua.common.objects import allgather_object
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.common.world import (
    add_process_set,
    is_initialized,
    process_set_by_ids,
    rank,
    size,
)


@dataclass(frozen=True)
class BaguaProcessGroup:
    """Ranks of the world in ascending order, and the communicator of these ranks."""

    process_set: ProcessSet

    @property
    def ranks(self) -> list[int]:
        return self.process_set.ranks

    def rank(self) -> int:
        """This process's number in the group."""
        return self.process_set.rank()

    def nranks(self) -> int:
        return self.process_set.size()

    def get_global_communicator(self) -> BaguaProcessGroup:
        """What the operations take as `comm`: the group itself."""
        return self


def _get_default_group() -> BaguaProcessGroup:
    """All ranks, by the name that scripts know."""
    return BaguaProcessGroup(process_set_of(None))


Communicator = Union[BaguaProcessGroup, ProcessSet, None]


def new_group(ranks: Iterable[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """A group of these ranks, or of all. Every rank of the world calls it, in the same order.

    `stream` is there for Bagua's sake and not needed.
    """
    wanted = ProcessSet(range(size()) if ranks is None else ranks)
    for known in process_set_by_ids().values():
        if known.ranks == wanted.ranks:
            return BaguaProcessGroup(known)
    return BaguaProcessGroup(add_process_set(wanted))


def from_torch_group(group: Any, stream: Any = None) -> BaguaProcessGroup:
    """The group of the same ranks as a group of torch.distributed.

    Every rank of the world calls it, and passes what torch gave it: a group that it is in, a
    different one than others perhaps, or the mark of a rank that is in none.
    """
    distributed = torch.distributed
    if (distributed.get_rank(), distributed.get_world_size()) != (rank(), size()):
        raise UsageError(
            f"this is rank {rank()} of {size()}, but rank {distributed.get_rank()} of "
            f"{distributed.get_world_size()} in torch.distributed; start both with the same ranks"
        )
    outside = group is distributed.GroupMember.NON_GROUP_MEMBER
    mine = () if outside else tuple(sorted(distributed.get_process_group_ranks(group)))
    everyone = sorted(set(allgather_object(mine)) - {()})
    groups = {ranks: new_group(ranks) for ranks in everyone}
    if not groups:
        raise UsageError("from_torch_group: no rank is in the group")
    return groups.get(mine) or groups[everyone[0]]


def process_set_of(comm: Communicator) -> ProcessSet:
    """The engine's name for a communicator; None is the world."""
    if not is_initialized():
        raise UsageError("bagua is not initialized; call init_process_group() first")
    if comm is None:
        return global_process_set
    if isinstance(comm, BaguaProcessGroup):
        return comm.process_set
    if isinstance(comm, ProcessSet):
        return comm
    raise UsageError(
        f"a group made by new_group or from_torch_group is needed, not {type(comm).__name__}"
    )


def own_process_set(comm: Communicator) -> ProcessSet | None:
    """`process_set_of` if this rank is in it: an operation does nothing on the others."""
    process_set = process_set_of(comm)
    return process_set if process_set.included() else None


def world_rank(process_set: ProcessSet, rank: int) -> int:
    """The number in the world of a rank of the set."""
    if not 0 <= rank < process_set.size():
        raise UsageError(f"there is no rank {rank} in a group of {process_set.size()}")
    return process_set.ranks[rank]
