"""The ranks of this job: starting and stopping the engine, who and where we are, process sets.

One default world per process is enough for nearly everyone, so the module-level functions speak
of it; it is the only mutable global of the package.
"""

from __future__ import annotations

import atexit
import ipaddress
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bagua.common import mpi
from bagua.common.config import (
    Config,
    check_one_of,
    tell_launcher,
    torchrun_size,
)
from bagua.common.core import core
from bagua.common.errors import PeerError, UsageError
from bagua.common.kinds import Kind
from bagua.common.meeting import (
    Communicator,
    communicator_of,
)
from bagua.common.mpi import MPI
from bagua.common.process_set import ProcessSet, checked, global_process_set
from bagua.common.running import World

_world: World | None = None
_exit_hook_installed = False
_failure_at_stop: str | None = None  # of the last world
_has_failed = False  # any world of this process
_uncaught: BaseException | None = None
_at_init: list[Callable[[], None]] = []


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
    global _world, _exit_hook_installed, _failure_at_stop
    config = Config.resolve(**settings)
    if isinstance(process_sets, str):
        check_one_of("process_sets", process_sets, ["dynamic"])
        process_sets = None
    if _world is not None:
        _refuse_other(config, settings)
        _add_missing(process_sets or ())
        return
    late = (
        f"bagua.init() ends this process: MPI has not started within {config.start_timeout_s:g} s "
        "(start_timeout_s). Has another rank not called init(), has it ended before, or does it "
        "not run?\n"
    )
    mpi.start(core.Deadline(min(config.start_timeout_s, 1e9), late))
    if not _exit_hook_installed:
        tell_launcher("init")
        _install_exit_hooks()  # first: also a failing init must not wait in MPI_Finalize
        _exit_hook_installed = True
    if comm is None:
        _refuse_torchrun()
    _world = World(communicator_of(comm), config)
    _failure_at_stop = None  # which the program has survived
    _add_missing(process_sets or ())
    for begin in _at_init:
        begin()


def at_init(begin: Callable[[], None]) -> None:
    """Has it called when a world starts, or now, if one runs."""
    _at_init.append(begin)
    if _world is not None:
        begin()


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
    global _world, _failure_at_stop, _has_failed
    if _world is None:
        return
    stopping, _world = _world, None
    stopping.stop()
    _failure_at_stop = stopping.engine.failure()
    _has_failed = _has_failed or _failure_at_stop is not None


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


def _refuse_torchrun() -> None:
    """Each process would train a model of its own, and nothing would tell."""
    if MPI.COMM_WORLD.size == 1 and torchrun_size() > 1:
        count = torchrun_size()
        raise UsageError(
            f"torchrun has started {count} processes, but it knows no MPI, and each would be a "
            f"world of its own: start them by bagua-run -np {count} or mpirun. Where each is to "
            "be one, say so with init(comm=mpi4py.MPI.COMM_WORLD)"
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

    MPI_Finalize waits for every rank. After a failure, though it was survived, or when this rank
    ends by an exception and the others do not know yet, that could be for ever, so it is skipped.
    """
    uncaught = _what_ends_this()
    failed = _failure_at_stop or (_world and _world.engine.failure())
    if isinstance(uncaught, PeerError) or (failed and uncaught is None):
        tell_launcher("peer")
    if uncaught is not None and _world is not None:
        _world.engine.stop()  # others learn that we leave; but wait for nobody
        _world.engine.wait_stopped(0.5)
    else:
        shutdown()
    if uncaught is None and not failed and _failure_at_stop:  # others never shut down
        failed = _failure_at_stop
        tell_launcher("peer")
    if not _has_failed and uncaught is None:
        return mpi.end()
    if failed and uncaught is None:
        print(f"bagua: this job failed: {failed}", file=sys.stderr)
    if mpi.ends_with_us() and (uncaught is not None or not failed):
        return None  # with the exit code that the program asked for
    if not failed and uncaught is None:  # which code it asked for cannot be found out
        print(
            "bagua: this rank ends with exit code 1, since MPI_Finalize, which whoever started MPI "
            "would call now, could wait for lost ranks; let bagua.init() start MPI",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
