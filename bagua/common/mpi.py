"""MPI in this process: it starts with the first `init`, not with an import, and ends at exit.

A process that merely imports the package, such as a worker of a DataLoader that is not forked, must
not start MPI: it has inherited its parent's place in the job and would take it a second time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import mpi4py

mpi4py.rc.initialize = False  # has no effect, and need not, if somebody imported mpi4py.MPI before
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

from bagua.common.config import claim_place, give_home, suggested  # noqa: E402
from bagua.common.errors import UsageError  # noqa: E402

__all__ = ["MPI", "end", "ends_with_us", "start"]

_LEVELS = {
    "single": MPI.THREAD_SINGLE,
    "funneled": MPI.THREAD_FUNNELED,
    "serialized": MPI.THREAD_SERIALIZED,
    "multiple": MPI.THREAD_MULTIPLE,
}
_ours = False  # we started it, so we end it


def start(guarded: AbstractContextManager[object]) -> None:
    """Starts MPI unless somebody has; refuses in a child of a rank.

    That returns when all ranks are there, and nothing interrupts it, so it is guarded.
    """
    global _ours
    claim_place()
    if MPI.Is_finalized():
        raise UsageError("MPI has been finalized in this process; init() must come before")
    if not MPI.Is_initialized():
        level = _LEVELS[mpi4py.rc.thread_level] if mpi4py.rc.threads else MPI.THREAD_SINGLE
        give_home()
        with suggested(), guarded:
            MPI.Init_thread(level)
        _ours = True


def ends_with_us() -> bool:
    """Whether nobody but `end` will call MPI_Finalize."""
    return _ours or not MPI.Is_initialized()


def end() -> None:
    """Ends MPI if `start` has started it; every rank has to."""
    if _ours and not MPI.Is_finalized():
        MPI.Finalize()
