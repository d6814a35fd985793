"""Interleaved measuring: every system takes its turn in every round, so that a machine whose speed
drifts is unfair to nobody."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Run = Callable[[], None]


def interleaved(
    runs: Mapping[str, Run],
    rounds: int,
    meet: Run,
    prepare: Mapping[str, Run] | None = None,
    warmup: int = 3,
) -> dict[str, dict[str, float]]:
    """Median and minimum seconds of each run. Ranks meet before each; `prepare` is not timed."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warmup + rounds):
        for name, run in runs.items():
            if prepare and name in prepare:
                prepare[name]()
            meet()
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if number >= warmup:
                times[name].append(elapsed)
    return {
        name: {"median_s": statistics.median(values), "min_s": min(values), "rounds": len(values)}
        for name, values in times.items()
    }
