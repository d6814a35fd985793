"""The files of checkpoints: each has its name only when all of it is on the disk."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bagua.common.errors import UsageError

TRACKER = "latest_checkpointed_iteration.txt"
SHARED = "shared.pt"
State = dict[str, Any]


def folder_name(iteration: int) -> str:
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
        raise UsageError(f"iteration is a number from 0 on, not {iteration!r}")
    return f"iter_{iteration:07d}"


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def latest(folder: Path) -> tuple[int, Path] | None:
    tracker = folder / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise UsageError(f"{tracker} holds {text!r} in place of the number of a checkpoint")
    return int(text), folder / folder_name(int(text))


def write(path: Path, state: State) -> None:
    with _atomic(path) as file:
        torch.save(state, file)


def replace(path: Path, content: bytes) -> None:
    with _atomic(path) as file:
        file.write(content)


@contextlib.contextmanager
def _atomic(path: Path) -> Iterator[Any]:
    """A file that has its name only when all of it is on the disk."""
    name = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    # Unlike one of tempfile, for whoever the umask lets read it.
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read(path: Path) -> State:
    if not path.exists():
        raise UsageError(f"{path} is missing; was the checkpoint copied without it?")
    state: State = torch.load(path, map_location="cpu", weights_only=False)
    return state
