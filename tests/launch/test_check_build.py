"""What the checklist says of GPUs that a build could use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bagua.launch.check_build import _gpu_items

OLD = "no cuda device: CUDA driver version is insufficient for CUDA runtime version"
LOST = "no NCCL: libnccl.so.2: cannot open; pip install 'bagua[cuda]', for CUDA 13 'bagua[cuda13]'"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            ("13.0", OLD, LOST, False),
            ["[ ] GPU: no cuda device, and no driver of NVIDIA's", "[ ] NCCL: not needed"],
        ),
        (("13.0", OLD, LOST, True), [f"[ ] GPU: {OLD}", "[ ] NCCL: not needed without a GPU"]),
        (
            ("13.0", "1 x H100", LOST, True),
            ["[X] GPU: 1 x", "cannot open; pip install nvidia-nccl-cu13"],
        ),
        (
            ("12.8", "1 x H100", LOST, True),
            ["[X] GPU: 1 x", "cannot open; pip install nvidia-nccl-cu12"],
        ),
        (("13.0", "1 x H100", "2.27.3", True), ["[X] GPU: 1 x", "[X] NCCL: 2.27.3"]),
    ],
)
def test_gpus_that_a_build_could_use(found, says):
    lines = _gpu_items(*found)
    assert [word in line for word, line in zip(says, lines)] == [True, True]


def test_it_asks_for_the_extension_where_that_may_be_missing():
    program = """
import sys
sys.modules["bagua._core"] = None
import bagua.launch.run
assert "mpi4py.MPI" not in sys.modules
sys.argv[1:] = ["--check-build"]
bagua.launch.run.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "[ ] extension: " in done.stdout, done
