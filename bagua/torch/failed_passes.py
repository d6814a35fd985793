"""Backward passes that fail, here or on another rank: nothing of one meets a later one.

What is exchanged says how many have failed before it. So where a rank has raised before it came to
an optimizer, the gradients that others have sent of that one are not taken for those of the next.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from bagua.common.errors import BaguaError

if TYPE_CHECKING:
    from bagua.torch.gradients import Gradients

# What a rank that refuses one optimizer's gradients says of another's comes as soon.
_HEARD_S = 1.0
# By process set, the last one, as autograd counts passes: from 0 on.
_last: dict[int, int] = {}


def count(task: int | None, process_set: int, everybody: Iterable[Gradients]) -> None:
    """A pass once, for all optimizers of these ranks; an exchange may also fail without a pass."""
    if task is not None:
        if task <= _last.get(process_set, -1):  # an optimizer may notice late
            return
        _last[process_set] = task
    for gradients in everybody:
        if gradients.standing.order[0] == process_set:
            gradients.failures += 1


def part(others: Iterable[Gradients], task: int) -> None:
    """An error has ended the pass before these were waited for.

    They are finished, unless the rank that the error is of has not come to them.
    """
    deadline_s = time.monotonic() + _HEARD_S
    for other in others:
        while not other.at_rest() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        if other.at_rest():
            with contextlib.suppress(BaguaError):
                other.exchange(task)
        else:
            other.withdraw("gave up")
