"""Without a GPU nothing is measured, and nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_is_measured_without_a_gpu():
    results = ROOT / "benchmarks" / "results"
    before = sorted(results.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "there is no GPU here, so there is nothing to measure\n"
    assert sorted(results.rglob("*")) == before
