"""Freed memory stays, or goes: the system counts the pages that it had to give again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEP = """
import os, resource, sys
import bagua
bagua.init(keep_memory=sys.argv[1] != "leave")
if sys.argv[1] == "leave later":
    bagua.shutdown()
    bagua.init(keep_memory=False)
elif sys.argv[1] == "child" and (child := os.fork()):
    os.waitpid(child, 0)
    os._exit(0)

def step():
    gradients = [bytearray(4 << 20) for _ in range(40)]

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
if sys.argv[1] == "child":
    os._exit(0)
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
    return int(done.stdout) * os.sysconf("SC_PAGESIZE") / (40 * (4 << 20))


def test_a_step_finds_the_memory_of_the_one_before():
    assert pages("keep") < 0.05
    assert pages("leave") > 0.2


RESIDENT = """
import os
import bagua

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

bagua.init(keep_memory=True)
before = resident()
gradients = [bytearray(4 << 20) for _ in range(40)]
for gradient in gradients:
    gradient[::4096] = b"1" * 1024
del gradient, gradients
kept = resident() - before
bagua.shutdown()
print(kept, resident() - before)
"""


def test_shutdown_gives_memory_back():
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True
    )
    kept, left = map(int, done.stdout.split())
    assert kept > 30 * (4 << 20)
    assert left < 4 << 20


@pytest.mark.parametrize("wish", ["leave later", "child"])
def test_who_trains_no_more_keeps_nothing(wish):
    assert pages(wish) > 0.2


@pytest.mark.parametrize(
    "variable",
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_the_user_has_the_last_word(variable):
    assert pages("keep", **dict([variable])) > 0.2


def test_what_is_not_about_freed_memory_does_not_count():
    assert pages("keep", GLIBC_TUNABLES="glibc.malloc.arena_max=2") < 0.05
