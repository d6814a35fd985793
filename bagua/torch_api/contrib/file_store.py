"""Values as files in a folder: of a local disk, or of memory as in /dev/shm."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from bagua.common.errors import UsageError
from bagua.common.warn import warn

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNFINISHED = "tmp"
_LEFTOVER_S = 3600  # nobody writes one value for so long


class FileStore:
    """One file for each value. They stay when the job is over, until somebody removes them.

    Args:
        name: of the data set, which has no other; a folder inside the other.
        folder: of each machine, or one that all see.
    """

    def __init__(self, name: str, folder: str | os.PathLike[str]) -> None:
        if not name:
            raise UsageError(
                "dataset_name is needed: a folder keeps the samples of all data sets; give each "
                "one a name, and another one when its samples change"
            )
        self._folder = Path(folder) / quote(f"{name}.cache", safe="")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._full = False
        self._remove_leftovers()

    def get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, values: Mapping[str, bytes]) -> None:
        for key, data in values.items():
            self._try_to_write(self._path(key), data)

    def count(self) -> int:
        return sum(1 for _ in self._folder.glob("??/*"))

    def agree(self, fact: str) -> str:
        path = self._folder / "fact"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if kept := path.read_text():
                return kept
        self._try_to_write(path, fact.encode())
        return fact

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self._folder / name[:2] / name  # few files in one folder

    def _remove_leftovers(self) -> None:
        """Of workers that were killed while they wrote."""
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(FileNotFoundError):  # another rank does the same
                if path.stat().st_mtime < time.time() - _LEFTOVER_S:
                    path.unlink()

    def _try_to_write(self, path: Path, data: bytes) -> None:
        """Unless there is no room."""
        if self._full:
            return
        try:
            self._write(path, data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._full = True
            warn(f"{self._folder} is full; the rest is not cached")

    def _write(self, path: Path, data: bytes) -> None:
        """All of it or nothing: others may look for it now."""
        path.parent.mkdir(exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=self._folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
