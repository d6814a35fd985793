"""A started operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from bagua.common.errors import UsageError


class Handle:
    """What the asynchronous operations return; give it to `synchronize` exactly once."""

    __slots__ = ("_core", "_finish", "_result")

    def __init__(
        self, core_handle: Any, finish: Optional[Callable[[Any], Any]], result: Any = None
    ) -> None:
        self._core = core_handle
        self._finish = finish
        self._result = result  # where `finish` has nothing to do

    def poll(self) -> bool:
        """Whether the operation is done; never blocks."""
        return self._core is None or bool(self._core.done())

    def wait(self) -> Any:
        """Blocks until the operation is done and returns its result."""
        core_handle = self._core
        if core_handle is None:
            raise UsageError("this handle has been waited for already; keep the first result")
        core_handle.wait()
        self._core = None
        finish, self._finish = self._finish, None
        return finish(core_handle) if finish else self._result


def poll(handle: Handle) -> bool:
    """Whether the operation is done; never blocks."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Blocks until the operation is done and returns its result.

    An error of the operation is raised here; its name may then be used again.
    """
    return handle.wait()
