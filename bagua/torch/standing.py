"""Whether the others can count on this rank: an interrupt in the middle of a step ends that, and so
does whatever keeps one from laying out something anew when all do.

What such a rank had begun cannot be told, line by line, and its next exchange must not be taken for
the one that others wait for. So it withdraws for good from whatever has names like its optimizer's,
and says so at once; who goes on wraps the optimizer anew, on every rank. What has not changed
anything yet may fail on one rank: then it does on all, who stay what they were.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from bagua.common.core import core
from bagua.common.errors import BaguaError, LeftError, PeerError, UsageError
from bagua.common.objects import broadcast_object
from bagua.common.process_set import ProcessSet
from bagua.common.together import together
from bagua.common.world import world
from bagua.torch.uncompiled import uncompiled

_REMEDY = (
    "in the middle of a step, which others may have completed. To go on, wrap the optimizer anew "
    "on every rank, and broadcast_parameters() or load a checkpoint"
)
_Method = TypeVar("_Method", bound=Callable[..., Any])
_numbers = itertools.count()  # of optimizers


class Standing:
    """Of this rank, in all that an optimizer exchanges, whichever driver does.

    Every name of that begins with `prefix` and a dot; without a name nothing may be exchanged.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        process_set._id()  # refuses one that is not in use
        root = process_set.ranks[0]
        # Ranks outside a process set have not made its optimizers: one rank does the counting.
        self.number = broadcast_object(next(_numbers), root, process_set=process_set)
        self.prefix = f"optimizer.{self.number}"
        self.process_set = process_set
        self.withdrawn = False
        self.retired = False  # another one has taken its place
        self._problem = ""  # why it has
        self._generations = itertools.count(1)
        # Closes what the next thing that is laid out takes the place of.
        self.make_room: Callable[[], None] = lambda: None

    @property
    def order(self) -> tuple[int, int]:
        """Among all optimizers of the job the same on every rank; numbers are a set's own."""
        number = self.process_set.process_set_id
        return -1 if number is None else number, self.number

    def name(self, what: str) -> str:
        return f"{self.prefix}.{what}"

    def generation(self) -> int:
        """Of what is laid out anew."""
        return next(self._generations)

    def withdraw(self, problem: str) -> None:
        if self.withdrawn:
            return
        self._problem = f"{problem} {_REMEDY}"
        with contextlib.suppress(BaguaError):  # the engine may have ended
            core.withdraw(world().engine, f"{self.prefix}.", self.process_set._id(), self._problem)
        self.withdrawn = True

    def retire(self) -> None:
        """On this rank; on others whoever exchanged by it may be gone already."""
        self.withdrawn = self.retired = True
        self._problem = "has wrapped the same optimizer anew: step by that wrapper, not this one"

    def planning(self) -> contextlib.AbstractContextManager[None]:
        """All ranks do at once, before they change anything: if one cannot, nobody goes on."""
        return together(f"{self.prefix}: what is planned", self.name("plan"), self.process_set)

    @contextlib.contextmanager
    def laying_out(self, what: str) -> Iterator[None]:
        """All ranks do at once, and would wait for one that cannot, mostly for want of memory."""
        make_room, self.make_room = self.make_room, lambda: None
        make_room()
        try:
            yield
        except Exception as error:
            why = str(error).partition("\n")[0]
            self.withdraw(f"could not make its {what} ({type(error).__name__}: {why})")
            raise

    def check(self) -> None:
        if self.withdrawn:
            raise UsageError(f"{self.prefix}: this rank {self._problem}")


def _guard(method: _Method, runs_users_code: bool) -> _Method:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaguaError as error:  # the others hear it, too
            late = isinstance(error, PeerError) and not isinstance(error, LeftError)
            if late and not runs_users_code:  # which others hear when they come, in another place
                self.withdraw("gave up")
            raise
        except BaseException as error:
            # Users may have a signal raise any error, which then comes while something is awaited.
            interrupts = not isinstance(error, Exception)
            if interrupts or not (runs_users_code or self.at_rest()):
                self.withdraw("was interrupted")
            raise

    return cast(_Method, call)


def in_one_piece(method: _Method) -> _Method:
    """An interrupt in the middle of it calls `self.withdraw()`, and so does a rank that is late."""
    return uncompiled(_guard(method, runs_users_code=False))


def in_a_hook(method: _Method) -> _Method:
    """The same of what hooks call, which are not compiled."""
    return _guard(method, runs_users_code=False)


def around_users_code(method: _Method) -> _Method:
    """The same, but the errors of what it calls are the user's."""
    return uncompiled(_guard(method, runs_users_code=True))
