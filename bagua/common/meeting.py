"""How processes meet in init, over MPI, before there is an engine."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Sequence
from typing import Any, Union

from bagua.common.config import Config
from bagua.common.errors import PeerError, UsageError
from bagua.common.mpi import MPI
from bagua.common.process_set import ProcessSet
from bagua.version import __version__

Communicator = Union[None, Sequence[int], MPI.Comm]


@functools.lru_cache
def _key(_: str) -> int:
    """Under which something hangs on a communicator.

    "engine", "messages": our private copies, so that init, shutdown, init uses the same. "arrival":
    a barrier of init that has not been completed yet.
    """
    return MPI.Comm.Create_keyval()


def communicator_of(comm: Communicator) -> MPI.Comm:
    if comm is None:
        return MPI.COMM_WORLD
    if isinstance(comm, MPI.Comm):
        return comm
    ranks = ProcessSet(comm).ranks
    if MPI.COMM_WORLD.rank not in ranks:
        raise UsageError(
            f"init({ranks}) was called on rank {MPI.COMM_WORLD.rank}, which is not one of them"
        )
    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    return MPI.COMM_WORLD.Create_group(group)


def private_copy(comm: MPI.Comm, purpose: str) -> MPI.Comm:
    copy: Any = comm.Get_attr(_key(purpose))
    if copy is None:
        copy = comm.Dup()
        comm.Set_attr(_key(purpose), copy)
    assert isinstance(copy, MPI.Comm)
    return copy


def forget_copy(comm: MPI.Comm, purpose: str) -> None:
    comm.Delete_attr(_key(purpose))


def meet(comm: MPI.Comm, timeout_s: float) -> None:
    """Returns when every rank is in init: what follows waits without a deadline."""
    arrival: Any = comm.Get_attr(_key("arrival")) or comm.Ibarrier()  # of a try that timed out
    comm.Set_attr(_key("arrival"), arrival)
    deadline = time.monotonic() + timeout_s
    while not arrival.Test():
        if time.monotonic() > deadline:
            raise PeerError(
                f"not all of {comm.size} ranks called init within {timeout_s:g} s "
                "(start_timeout_s); did one fail before it?"
            )
        time.sleep(0.001)
    comm.Delete_attr(_key("arrival"))


def introduce(comm: MPI.Comm, config: Config) -> list[str]:
    """Every rank's host; raises when ranks were set up differently."""
    mine = {"bagua version": __version__, **config.agreeing()}
    everyone = comm.allgather((socket.gethostname(), mine))
    for other, (_, theirs) in enumerate(everyone):
        for field, value in everyone[0][1].items():
            if theirs[field] != value:
                raise UsageError(
                    f"{field} differs between ranks: {value!r} on rank 0, {theirs[field]!r} on "
                    f"rank {other}; set it to one value everywhere"
                )
    return [host for host, _ in everyone]


def by_host(hosts: list[str]) -> list[list[int]]:
    places: dict[str, list[int]] = {}
    for number, host in enumerate(hosts):
        places.setdefault(host, []).append(number)
    return list(places.values())
