"""Freed memory stays, or goes: the system counts the pages that it had to give again."""

from __future__ import annotations

import os
import subprocess
import sys

STEP = """
import resource, sys
import numpy as np
import bagua
bagua.init(keep_memory=sys.argv[1] == "keep")

def step():
    gradients = [np.ones(4 << 20, np.uint8) for _ in range(12)]

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(wish: str, **variables: str) -> float:
    """Those of a second step, as a share of what it allocates."""
    done = subprocess.run(
        [sys.executable, "-c", STEP, wish],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return int(done.stdout) * os.sysconf("SC_PAGESIZE") / (12 * (4 << 20))


def test_a_step_finds_the_memory_of_the_one_before():
    assert pages("keep") < 0.05
    assert pages("leave") > 0.2


def test_the_user_has_the_last_word():
    assert pages("keep", MALLOC_TRIM_THRESHOLD_="131072") > 0.2
