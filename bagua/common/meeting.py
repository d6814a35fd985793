"""How processes meet in init, over MPI, before there is an engine.

Whatever can go wrong on one rank alone comes before they meet and is told when they do, so that
nobody waits for it; and every wait has a deadline.
"""

from __future__ import annotations

import functools
import os
import pickle
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np

from bagua.common.config import Config
from bagua.common.errors import BaguaError, PeerError, UsageError
from bagua.common.machine import machine, usable_cores
from bagua.common.mpi import MPI
from bagua.common.process_set import ProcessSet
from bagua.version import __version__

# Of an init that timed out; MPI may still write to their memory.
_broken_off: list[MPI.Request] = []

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


def private_copy(comm: MPI.Comm, purpose: str, timeout_s: float) -> MPI.Comm:
    copy: Any = comm.Get_attr(_key(purpose))
    if copy is None:
        copy, request = comm.Idup()
        _complete(request, comm, timeout_s)
        comm.Set_attr(_key(purpose), copy)
    assert isinstance(copy, MPI.Comm)
    return copy


def forget_copy(comm: MPI.Comm, purpose: str) -> None:
    comm.Delete_attr(_key(purpose))


def meet(comm: MPI.Comm, timeout_s: float) -> None:
    """Returns when every rank is in init."""
    arrival: Any = comm.Get_attr(_key("arrival")) or comm.Ibarrier()  # of a try that timed out
    comm.Set_attr(_key("arrival"), arrival)
    _complete(arrival, comm, timeout_s)
    comm.Delete_attr(_key("arrival"))


def _complete(request: MPI.Request, comm: MPI.Comm, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not _is_done(request):
        if time.monotonic() > deadline:
            _broken_off.append(request)
            raise PeerError(
                f"not all of {comm.size} ranks called init within {timeout_s:g} s "
                "(start_timeout_s); did one fail before it?"
            )
        time.sleep(0.001)


def _is_done(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception as error:  # of an MPI that survives the loss of a process
        raise PeerError(f"a rank has ended while others were in init ({error})") from None


@dataclass
class Card:
    """What a rank tells the others of itself."""

    host: str = ""
    pid: int = 0
    machine: str = ""
    cores: frozenset[int] = frozenset()
    address: str = ""  # where rank 0 can be reached
    agreeing: dict[str, Any] = field(default_factory=dict)  # must be the same on all ranks
    problem: BaguaError | None = None  # why this rank cannot go on

    def write(self, config: Config) -> None:
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.machine, self.cores = machine(), usable_cores()
        self.agreeing = {"bagua version": __version__, **config.agreeing()}

    def excuse(self, rank: int, error: Exception) -> None:
        """Ours tell of themselves; any other is a failure of this rank."""
        what = f"rank {rank} failed in init: {type(error).__name__}: {error}"
        self.problem = error if isinstance(error, BaguaError) else PeerError(what)


def introduce(comm: MPI.Comm, mine: Card, timeout_s: float) -> list[Card]:
    """Every rank's card; raises where one has a problem, or they were set up differently."""
    everyone: list[Card] = _tell_all(comm, mine, timeout_s)
    for card in everyone:
        if card.problem is not None:
            raise card.problem
    for other, card in enumerate(everyone):
        for name, value in everyone[0].agreeing.items():
            if card.agreeing[name] != value:
                raise UsageError(
                    f"{name} differs between ranks: {value!r} on rank 0, {card.agreeing[name]!r} "
                    f"on rank {other}; set it to one value everywhere"
                )
    return everyone


def _tell_all(comm: MPI.Comm, mine: Any, timeout_s: float) -> list[Any]:
    """What every rank gives, in their order."""
    own = np.frombuffer(pickle.dumps(mine), np.uint8)
    counts = np.empty(comm.size, np.int64)
    _complete(comm.Iallgather(np.array([own.size]), counts), comm, timeout_s)
    everything = np.empty(counts.sum(), np.uint8)
    _complete(comm.Iallgatherv(own, (everything, counts)), comm, timeout_s)
    parts = np.split(everything, np.cumsum(counts)[:-1])
    return [pickle.loads(part.tobytes()) for part in parts]


def by_host(hosts: list[str]) -> list[list[int]]:
    places: dict[str, list[int]] = {}
    for number, host in enumerate(hosts):
        places.setdefault(host, []).append(number)
    return list(places.values())
