"""`CacheLoader`: values by key, loaded once and kept where all ranks find them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from typing import Any, Protocol

from bagua.common.config import check_one_of
from bagua.common.errors import UsageError
from bagua.common.warn import warn
from bagua.torch_api.contrib.file_store import FileStore
from bagua.torch_api.contrib.redis_store import RedisStore


class Store(Protocol):
    """Where bytes are kept. It may forget some."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, values: Mapping[str, bytes]) -> None: ...

    def count(self) -> int: ...

    def agree(self, fact: str) -> str:
        """The first fact that was given for this name, by whoever has written to it."""
        ...


# Each takes the name of the data set first.
STORES: dict[str, Callable[..., Store]] = {"redis": RedisStore, "files": FileStore}


class CacheLoader:
    """Asks a store for a value, and loads and stores what it has not.

    It can be used in the workers of a `DataLoader`. Values are pickled: let nobody write to the
    store who may not run code here.

    Args:
        backend: `"redis"`, whose arguments are those of `RedisStore`, or `"files"`, of `FileStore`.
        dataset_name: values of one name are apart from those of another. Needed where others can
            find them: in files, and in servers that are named by `hosts`.
        writer_buffer_size: so many values are written together, or fewer when a process ends, as a
            worker of a `DataLoader` does after each epoch; until then others load them again.

    >>> import tempfile
    >>> cache = CacheLoader("files", "numbers", folder=tempfile.mkdtemp())
    >>> cache.get("seven", lambda key: 7), cache.get("seven", None), cache.num_keys()
    (7, 7, 1)
    """

    def __init__(
        self,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        **kwargs: Any,
    ) -> None:
        check_one_of("backend", backend, STORES)
        if isinstance(writer_buffer_size, bool) or not isinstance(writer_buffer_size, int):
            raise UsageError(f"writer_buffer_size is a number, not {writer_buffer_size!r}")
        if writer_buffer_size < 1:
            raise UsageError(f"writer_buffer_size is at least 1, not {writer_buffer_size}")
        self.writer_buffer_size = writer_buffer_size
        self.store = STORES[backend](dataset_name, **kwargs)
        self._unwritten: dict[str, bytes] = {}
        self._warned = False
        self._at_end: Finalize | None = None  # of the process that has loaded something last

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned."""
        return {**vars(self), "_unwritten": {}, "_at_end": None}

    def get(self, key: Any, load_fn: Callable[[Any], Any]) -> Any:
        """The value of a key, by `load_fn(key)` where it is not in the store."""
        name = str(key)
        data = self._unwritten.get(name)
        if data is None:
            data = self.store.get(name)
        if data is not None:
            try:
                return pickle.loads(data)
            except Exception as error:  # cut short, or of a class that is no more
                self._warn_of_unreadable(name, error)
        value = load_fn(key)
        self._unwritten[name] = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if len(self._unwritten) >= self.writer_buffer_size:
            self.flush()
        elif self._at_end is None or not self._at_end.still_active():
            arguments = (self.store, self._unwritten)
            self._at_end = Finalize(self, _write, arguments, exitpriority=0)
        return value

    def _warn_of_unreadable(self, name: str, error: Exception) -> None:
        if not self._warned:
            warn(
                f"the cached value of {name} cannot be read ({type(error).__name__}: {error}); it "
                "is made again, as others will be",
            )
        self._warned = True

    def flush(self) -> None:
        """Writes what has been loaded here and not written yet."""
        _write(self.store, self._unwritten)

    def num_keys(self) -> int:
        """How many values of this name the store has."""
        self.flush()
        return self.store.count()


def _write(store: Store, unwritten: dict[str, bytes]) -> None:
    values = dict(unwritten)
    unwritten.clear()
    if values:
        store.put(values)
