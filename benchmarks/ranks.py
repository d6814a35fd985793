"""Ranks of this machine that run a module of ours."""

from __future__ import annotations

import os
import subprocess
import sys


def on_ranks(np: int, module: str, *arguments: str) -> int:
    """Its exit code."""
    command = [sys.executable, "-m", "bagua.launch", "-np", str(np)]
    command += [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
