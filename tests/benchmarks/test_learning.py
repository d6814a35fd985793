"""The small transformer learns through a codec, and the program tells and draws it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.learning_tasks import Text


@pytest.mark.slow
def test_text(tmp_path):
    """A quarter of the steps: half of what there is to learn."""
    names = ["bytegrad", "diloco_short"]
    words = ["--quick", "--task", "text", "--ranks", "2", "--algorithms", *names]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.learning", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "build/bench/learning.json").read_text())["text"]
    alone = figures["1"]["gradient_allreduce"]
    for name in names:
        course = figures["2"][name]
        first, last = (
            statistics.fmean(course["losses"][part]) for part in (slice(5), slice(-5, None))
        )
        assert last < first / 1.5
        assert Text.lost(course["score"], alone["score"]) < 2 * Text.allowed(name)
        assert f"2 x {name}" in done.stdout
    assert figures["2"]["bytegrad"]["per_parameter"] < 1.2  # of two ranks half of 2.03 a value
    assert (tmp_path / "build/bench/learning.png").read_bytes().startswith(b"\x89PNG")
