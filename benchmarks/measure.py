"""Interleaved measuring: every system takes its turn in every round, so that a machine whose speed
drifts is unfair to nobody. A turn is a few runs in a row, as in training, where the same step comes
again and again; the first of them finds the caches full of somebody else's data and is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

Run = Callable[[], None]
Turns = Mapping[str, Callable[[], AbstractContextManager[None]]]


def interleaved(
    runs: Mapping[str, Run],
    rounds: int,
    meet: Run,
    turn: int = 5,
    in_a_row: bool = False,
    turns: Turns | None = None,
) -> dict[str, dict[str, float]]:
    """Median and minimum seconds of each run over so many rounds of `turn` runs.

    Ranks meet before each run; or, of runs that are a meeting themselves, before each row of them.
    `turns` has what must be there during the turns of a run, and not during others.
    """
    turns = turns or {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1 + rounds):
        for name, run in runs.items():
            with turns.get(name, nullcontext)():
                for again in range(1 + turn):
                    if not (again and in_a_row):
                        meet()
                    start = time.perf_counter()
                    run()
                    elapsed = time.perf_counter() - start
                    if number and again:
                        times[name].append(elapsed)
    return {
        name: {"median_s": statistics.median(values), "min_s": min(values), "rounds": len(values)}
        for name, values in times.items()
    }
