"""The ranks of this job: starting and stopping the engine, who and where we are, process sets.

One default world per process is enough for nearly everyone, so the module-level functions speak
of it; it is the only mutable global of the package.
"""

from __future__ import annotations

import atexit
import ipaddress
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from bagua.common import mpi
from bagua.common.config import (
    Config,
    check_one_of,
    malloc_is_told,
    nccl_shares_gpu,
    report_verdict,
    torchrun_size,
)
from bagua.common.core import core
from bagua.common.errors import BaguaError, PeerError, UsageError
from bagua.common.heap import give_back_freed, keep_freed
from bagua.common.kinds import Kind, Urgency
from bagua.common.machine import core_share
from bagua.common.meeting import (
    Card,
    Communicator,
    by_host,
    communicator_of,
    forget_copy,
    introduce,
    meet,
    private_copy,
)
from bagua.common.messages import Messages
from bagua.common.mpi import MPI
from bagua.common.nccl import library_path
from bagua.common.process_set import ProcessSet, checked, global_process_set

_MOST_HELPERS = 3  # a few cores use up the bandwidth of the memory


class World:
    """A running engine and what its ranks know of each other."""

    def __init__(self, comm: MPI.Comm, config: Config) -> None:
        self.config = config
        self._parent = comm
        timeout_s = config.start_timeout_s
        self.rank: int = comm.rank
        self.size: int = comm.size
        card, error = Card(), None
        try:
            card.write(config)
            settings = self._settings()
            listener = self._listen(card)
        except Exception as problem:  # told to those who would wait for this rank
            error = problem
            card.excuse(self.rank, problem)
        meet(comm, timeout_s)
        message_comm = private_copy(comm, "messages", timeout_s)
        self._comm = private_copy(comm, "engine", timeout_s)  # the engine's until it stops
        try:
            cards = introduce(self._comm, card, timeout_s)
        except BaguaError:
            if error is not None:
                raise error from None
            raise
        hosts = [card.host for card in cards]
        mine = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.local_rank = mine.index(self.rank)
        self.local_size = len(mine)
        peers = [ranks[self.local_rank] for ranks in by_host(hosts) if len(ranks) > self.local_rank]
        self.cross_rank = peers.index(self.rank)
        self.cross_size = len(peers)
        self.is_homogeneous = len({len(ranks) for ranks in by_host(hosts)}) == 1
        self.process_sets: dict[int, ProcessSet] = {}
        here = [other.cores for other in cards if other.machine == card.machine]
        self.core_count = core_share(card.cores, here)  # this rank's share of its machine
        self.engine = self._start_engine(settings, listener, cards)
        self.messages = Messages(message_comm, self.engine, config)
        global_process_set.ranks = list(range(self.size))
        global_process_set._bind(0, self.rank)
        self.process_sets[0] = global_process_set
        self._keeps_memory = config.keep_memory and not malloc_is_told()
        if self._keeps_memory:
            keep_freed()

    def overlaps(self, busy_threads: int) -> bool:
        """Whether an exchange while the model computes makes training faster.

        It does where something else than this machine's cores is waited for, or one of them is
        free.
        """
        if self.config.overlap != "auto":
            return self.config.overlap == "always"
        return self.local_size < self.size or self.core_count >= busy_threads + 1

    def _settings(self) -> dict[str, Any]:
        """What the engine is told of this rank."""
        settings = asdict(self.config)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            settings["inline_drive"] = False  # keeps all MPI on the coordination thread
        settings["nccl_path"] = library_path()
        settings["nccl_shares_gpu"] = nccl_shares_gpu()
        return settings

    def _listen(self, card: Card) -> Any:
        """Where the others' control connections arrive, which is on rank 0."""
        if self.rank != 0:
            return None
        listener = core.Listener(self.size, self.config.network_interfaces)
        card.address = listener.address
        return listener

    def _start_engine(self, settings: dict[str, Any], listener: Any, cards: list[Card]) -> Any:
        if settings["helpers"] < 0:
            settings["helpers"] = min(max(self.core_count - 1, 0), _MOST_HELPERS)
        settings["helpers"] = int(settings["helpers"])
        if self.core_count < 1:
            settings["spin_us"] = 0.0  # spinning would take the core a peer needs
        return core.Engine(
            communicator=MPI._addressof(self._comm),
            listener=listener,
            address=cards[0].address,
            rank=self.rank,
            settings=settings,
            names=[f"host {card.host}, pid {card.pid}" for card in cards],
        )

    def request(
        self, kind: Kind, name: str = "", numbers: Sequence[int] = (), **fields: int
    ) -> Any:
        """Submits a request that carries no tensors; returns its finished handle."""
        root, in_set = fields.get("root", -1), fields.get("set", 0)
        handle = core.submit(
            self.engine,
            kind,
            name,
            [],
            0,
            root,
            1.0,
            1.0,
            in_set,
            numbers,
            Urgency.WAITED,
            None,
            None,
        )
        handle.wait()
        return handle

    def stop(self) -> None:
        """Stops the engine; on rank 0 returns when every rank has."""
        self.leave_memory()
        for process_set in self.process_sets.values():
            process_set._bind(None, self.rank)
        self.engine.stop()
        while not self.engine.wait_stopped(0.25):
            pass  # back in Python, so that Ctrl-C can end the wait
        if self.engine.failure():
            # What was broken off may still be under way: never use these copies again.
            for purpose in ("engine", "messages"):
                forget_copy(self._parent, purpose)

    def leave_memory(self) -> None:
        """This process trains no more."""
        if self._keeps_memory:
            give_back_freed()


_world: World | None = None
_exit_hook_installed = False
_failure_at_stop: str | None = None
_uncaught: BaseException | None = None


def init(
    comm: Communicator = None,
    process_sets: str | Iterable[ProcessSet] | None = None,
    **settings: Any,
) -> None:
    """Starts the engine, once: a second call does nothing until `shutdown`.

    `comm` is an mpi4py communicator, or ranks of the world. `settings` are those of
    `bagua.common.config.Config`. `process_sets` that are not in use yet are added, in either case;
    "dynamic", which Horovod needs for later ones, changes nothing.
    """
    global _world, _exit_hook_installed
    config = Config.resolve(**settings)
    if isinstance(process_sets, str):
        check_one_of("process_sets", process_sets, ["dynamic"])
        process_sets = None
    if _world is not None:
        _refuse_other(config, settings)
        _add_missing(process_sets or ())
        return
    mpi.start()
    if not _exit_hook_installed:
        _install_exit_hooks()  # first: also a failing init must not wait in MPI_Finalize
        _exit_hook_installed = True
    _world = World(communicator_of(comm), config)
    _warn_of_torchrun()
    _add_missing(process_sets or ())


def _add_missing(process_sets: Iterable[ProcessSet]) -> None:
    for process_set in process_sets:
        if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
            add_process_set(process_set)


def _refuse_other(config: Config, settings: dict[str, Any]) -> None:
    for name in settings:
        running, asked = getattr(world().config, name), getattr(config, name)
        if running != asked:
            raise UsageError(
                f"bagua runs with {name}={running!r}; init({name}={asked!r}) needs shutdown() first"
            )


def shutdown() -> None:
    """Stops the engine; open requests fail. Every rank should call it; `init` may follow."""
    global _world, _failure_at_stop
    if _world is None:
        return
    stopping, _world = _world, None
    stopping.stop()
    _failure_at_stop = _failure_at_stop or stopping.engine.failure()


def world() -> World:
    """The running default world."""
    if _world is None:
        raise UsageError("bagua is not initialized; call init() first")
    return _world


def is_initialized() -> bool:
    return _world is not None


def rank() -> int:
    return world().rank


def size() -> int:
    return world().size


def local_rank() -> int:
    """This process's place among those on its host."""
    return world().local_rank


def local_size() -> int:
    return world().local_size


def cross_rank() -> int:
    """This process's place among those with its local rank, one per host."""
    return world().cross_rank


def cross_size() -> int:
    return world().cross_size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of ranks."""
    return world().is_homogeneous


def mpi_threads_supported() -> bool:
    world()
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def addresses() -> list[str]:
    """Of this machine, numeric: those that its control connections announce to others."""
    hosts = core.local_addresses(world().config.network_interfaces)
    outside = [host for host in hosts if not ipaddress.ip_address(host).is_loopback]
    return outside or hosts


def counters() -> dict[str, int]:
    """What this rank has done since init.

    `sent_nbytes` counts bytes given to messages; exchanges inside a machine need none, where they
    go through shared memory. `touched_nbytes` counts bytes of memory that exchanges read or wrote,
    `codec_us` the microseconds that codecs took on CPUs, `exchanges` how many there were, `helped`
    how often another thread joined in one, `control_messages` what the ranks said to agree on them.
    """
    return dict(world().engine.counters())


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a process set usable. Every rank of the world calls it, also those not in it."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    here = world()
    if process_set.process_set_id is not None:
        raise UsageError(f"{process_set!r} has been added already")
    handle = here.request(Kind.ADD_PROCESS_SET, numbers=process_set.ranks)
    process_set._bind(handle.value, here.rank)
    here.process_sets[handle.value] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Undoes `add_process_set`, on every rank; False if it was not in use."""
    here = world()
    checked(process_set)
    if process_set.process_set_id is None:
        return False
    if process_set.process_set_id == 0:
        raise UsageError("the global process set cannot be removed")
    here.request(Kind.REMOVE_PROCESS_SET, root=process_set.process_set_id)
    del here.process_sets[process_set.process_set_id]
    process_set._bind(None, here.rank)
    return True


def process_set_by_ids() -> dict[int, ProcessSet]:
    return dict(world().process_sets)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    here = world()
    here.request(Kind.BARRIER, set=checked(process_set)._id())


def join(process_set: ProcessSet = global_process_set) -> int:
    """Takes part in the others' operations with zeros until every rank has joined.

    Returns the last rank that did: the one that trained on the most batches.
    """
    here = world()
    return int(here.request(Kind.JOIN, set=checked(process_set)._id()).value)


def _warn_of_torchrun() -> None:
    if world().size == 1 and torchrun_size() > 1:
        print(
            f"bagua: torchrun has started {torchrun_size()} processes, but each is a world of its "
            "own: Bagua's ranks are started by bagua-run or mpirun",
            file=sys.stderr,
        )


def _install_exit_hooks() -> None:
    previous = sys.excepthook

    def note_uncaught(kind: Any, error: Any, trace: Any) -> None:
        global _uncaught
        _uncaught = error
        previous(kind, error, trace)

    sys.excepthook = note_uncaught
    atexit.register(_leave)
    os.register_at_fork(after_in_child=_abandon)


def _what_ends_this() -> BaseException | None:
    """The exception that nobody caught.

    Our hook does not hear of it where somebody has put another in its place, or where Ctrl-C comes
    right then. What Python printed last is one, unless somebody called who printed it.
    """
    last = getattr(sys, "last_value", None)
    trace = None if last is None else last.__traceback__
    at_the_top = trace is not None and trace.tb_frame.f_back is None
    return _uncaught or (last if at_the_top else None)


def _abandon() -> None:
    """A forked child has no part in the world: it has neither the sockets nor the thread."""
    global _world
    if _world is not None:
        core.abandon(_world.engine)
        _world.leave_memory()
        _world = None
    atexit.unregister(_leave)


def _leave() -> None:
    """The one way out.

    MPI_Finalize waits for every rank. After a failure, or when this rank ends by an exception and
    the others do not know yet, that could be for ever, so it is skipped.
    """
    uncaught = _what_ends_this()
    failed = _failure_at_stop or (_world and _world.engine.failure())
    if isinstance(uncaught, PeerError) or (failed and uncaught is None):
        report_verdict()
    if uncaught is not None and _world is not None:
        _world.engine.stop()  # others learn that we leave; but wait for nobody
        _world.engine.wait_stopped(0.5)
    else:
        shutdown()
    if _failure_at_stop is None and uncaught is None:
        return mpi.end()
    if failed and uncaught is None:
        print(f"bagua: this job failed: {failed}", file=sys.stderr)
    if mpi.ends_with_us() and (uncaught is not None or not failed):
        return None  # with the exit code that the program asked for
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
