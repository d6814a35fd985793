"""Whether the others can count on this rank: an interrupt in the middle of a step ends that.

What such a rank had begun cannot be told, line by line, and its next exchange must not be taken for
the one that others wait for. So it withdraws for good from whatever has names like its optimizer's,
and says so at once; who goes on wraps the optimizer anew, on every rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from bagua.common.core import core
from bagua.common.errors import BaguaError, UsageError
from bagua.common.process_set import ProcessSet
from bagua.common.world import world

_REMEDY = (
    "was interrupted in the middle of a step, which others may have completed. To go on, wrap the "
    "optimizer anew on every rank, and broadcast_parameters() or load a checkpoint"
)
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Standing:
    """Of this rank, in what has names that begin with `prefix` and a dot."""

    def __init__(self, prefix: str, process_set: ProcessSet) -> None:
        self._prefix, self._process_set = prefix, process_set
        self.withdrawn = False

    def name(self, what: str) -> str:
        return f"{self._prefix}.{what}"

    def withdraw(self) -> None:
        with contextlib.suppress(BaguaError):  # the engine may have ended
            core.withdraw(world().engine, f"{self._prefix}.", self._process_set._id(), _REMEDY)
        self.withdrawn = True

    def check(self) -> None:
        if self.withdrawn:
            raise UsageError(f"{self._prefix}: this rank {_REMEDY}")


def _guard(method: _Method, runs_users_code: bool) -> _Method:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaguaError:
            raise  # the others hear it, too
        except BaseException as error:
            # Users may have a signal raise any error, which then comes while something is awaited.
            interrupts = not isinstance(error, Exception)
            if interrupts or not (runs_users_code or self.at_rest()):
                self.withdraw()
            raise

    return cast(_Method, call)


def in_one_piece(method: _Method) -> _Method:
    """An interrupt in the middle of it calls `self.withdraw()`."""
    return _guard(method, runs_users_code=False)


def around_users_code(method: _Method) -> _Method:
    """The same, but the errors of what it calls are the user's."""
    return _guard(method, runs_users_code=True)
