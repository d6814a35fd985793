"""A started operation; the class itself is the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bagua.common.errors import UsageError


class Handle(Protocol):
    """What the asynchronous operations return; give it to `synchronize` exactly once."""

    finish: Callable[[Any], Any]  # makes the result of this finished handle

    def poll(self) -> bool:
        """Whether the operation is done; never blocks."""

    def wait(self) -> Any:
        """Blocks until the operation is done and returns its result."""

    def rows(self, index: int) -> list[int]:
        """Rows of output `index` that came from each rank."""


def poll(handle: Handle) -> bool:
    """Whether the operation is done; never blocks."""
    try:
        ask = handle.poll
    except AttributeError:
        raise _no_handle(handle) from None
    return ask()


def synchronize(handle: Handle) -> Any:
    """Blocks until the operation is done and returns its result.

    An error of the operation is raised here; its name may then be used again.
    """
    try:
        wait = handle.wait
    except AttributeError:
        raise _no_handle(handle) from None
    return wait()


def _no_handle(other: Any) -> UsageError:
    return UsageError(f"what an _async operation returned is needed, not {other!r}")
