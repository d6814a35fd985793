"""What `make` does on a machine with a GPU, which a driver's file stands for here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DRIVER = __file__

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="no make")


def make(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_which_torch_is_installed(tmp_path: Path):
    for driver, index in (("", "download.pytorch.org/whl/cpu"), (DRIVER, "pypi.org/simple")):
        told = make("-n", "dev", f"VENV={tmp_path}/none", f"DRIVER={driver}").stdout
        (line,) = [line for line in told.splitlines() if "show -q torch" in line]
        assert index in line
        assert ("--no-deps" in line) == (driver == "")  # those of the one for GPUs are many
    told = make("-n", "dev", f"VENV={tmp_path}/none", f"DRIVER={DRIVER}", "TORCH_INDEX=mine").stdout
    assert "--extra-index-url mine" in told


def test_kernels_are_run_under_a_sanitizer(tmp_path: Path):
    sanitizer = tmp_path / "sanitizer"
    sanitizer.write_text('#!/bin/sh\necho "$@"\n[ "$2" != racecheck ] || exit 99\n')
    sanitizer.chmod(0o755)
    ran = make("-o", "dev", "sanitize-gpu", f"SANITIZER={sanitizer}")
    tools = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("--tool")]
    assert tools == ["memcheck", "synccheck", "racecheck"]
    assert ran.returncode != 0  # what the last has found
    assert "is missing" in make("-o", "dev", "sanitize-gpu", "SANITIZER=").stdout


@pytest.mark.parametrize("failing", ["-k?np2*", "-k?not*", "--ignore=*", "nothing"])
def test_everyday_tests_fail_with_each_part(tmp_path: Path, failing: str):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    fails = "echo FAILED here; exit 1"
    python.write_text(f'#!/bin/sh\necho "$@"\ncase "$*" in *{failing}) {fails}; esac\n')
    python.chmod(0o755)
    log = tmp_path / "log"  # another one than that of the run that this test is in
    ran = make("-o", "dev", "test-python", f"VENV={tmp_path}", f"REST_LOG={log}")
    assert ran.stdout.count("-m pytest") == 3
    assert (ran.returncode == 0) == (failing == "nothing")
    hidden = failing in ("-k?not*", "--ignore=*")  # in the half that prints when it has ended
    assert ran.stdout.splitlines()[-1].startswith(f"{log}:FAILED ") == hidden


@pytest.mark.parametrize("for_gpus", [True, False])
def test_a_gpu_is_not_skipped_over(tmp_path: Path, for_gpus: bool):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    # Which torch there is; and pytest, which passes.
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && echo "$@" || exit {int(not for_gpus)}\n')
    python.chmod(0o755)
    ran = make("-o", "dev", "test-gpu", f"VENV={tmp_path}", f"DRIVER={DRIVER}")
    assert (ran.returncode == 0) == for_gpus
    assert ("-m pytest tests/gpu" in ran.stdout) == for_gpus
    assert ("is one for CPUs" in ran.stdout) != for_gpus


@pytest.mark.parametrize("shares", [True, False])
def test_nccl_is_not_done_without_where_two_ranks_should_share_it(tmp_path: Path, shares: bool):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    told = 'echo "$NCCL_MULTI_RANK_GPU_ENABLE $@"'
    python.write_text(f'#!/bin/sh\n{told}\n[ "$2" != gpu.sharing ] || exit {int(not shares)}\n')
    python.chmod(0o755)
    ran = make("-o", "dev", "test-gpu", f"VENV={tmp_path}", f"DRIVER={DRIVER}")
    assert (ran.returncode == 0) == shares
    assert ("1 -m pytest tests/gpu" in ran.stdout) == shares
