"""Pickled Python objects between ranks.

An object that cannot be pickled on its rank is an error on every rank, never a hang.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from bagua.common import numpy_ops
from bagua.common.errors import JoinedError, UsageError
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.common.ranks_text import ranks_text
from bagua.common.world import rank

_UNPICKLABLE = -1
_NONE = b"!"  # in the place of a pickle, which has more bytes


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object on every rank; what the others pass is ignored.

    The root gets its own object back, not a copy. `root_rank` is a rank of the world, in a set too.
    """
    is_root = rank() == root_rank
    data, problem = _pickled(obj) if is_root else (b"", None)
    size = np.array([_UNPICKLABLE if problem else len(data)], np.int64)
    numpy_ops.broadcast_(size, root_rank, name and f"{name}.size", process_set)
    nbytes = int(size[0])
    if nbytes == _UNPICKLABLE:
        raise UsageError(
            f"broadcast_object: the object on rank {root_rank} cannot be pickled"
            + (f": {problem}" if problem else "")
        ) from problem
    # The engine remembers every shape it has agreed on: powers of two keep these few.
    payload = np.zeros(1 << max(nbytes - 1, 0).bit_length(), np.uint8)
    payload[: len(data)] = np.frombuffer(data, np.uint8)
    numpy_ops.broadcast_(payload, root_rank, name and f"{name}.data", process_set)
    return obj if is_root else pickle.loads(payload.data[:nbytes])


def broadcast_object_fn(
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """`broadcast_object` with everything but the object already given."""

    def broadcast(obj: Any = None) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return broadcast


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in rank order."""
    data, problem = _pickled(obj)
    mine = np.frombuffer(data or _NONE, np.uint8)
    (gathered,), (rows,) = numpy_ops.allgather_with_rows([mine], name, process_set)
    of = list(zip(process_set.ranks, rows))
    if joined := [rank for rank, nbytes in of if nbytes == 0]:
        raise JoinedError(
            f"allgather_object: no object of {ranks_text(joined)}: who has joined gives none"
        )
    if culprits := [rank for rank, nbytes in of if nbytes == len(_NONE)]:
        raise UsageError(
            f"allgather_object: the object on {ranks_text(culprits)} cannot be pickled"
            + (f": {problem}" if problem else "")
        ) from problem
    ends = np.cumsum(rows)
    return [pickle.loads(gathered.data[end - nbytes : end]) for end, nbytes in zip(ends, rows)]


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    """The pickle, or nothing and the reason."""
    try:
        return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), None
    except Exception as problem:  # whatever a user's __reduce__ raises
        return b"", problem
