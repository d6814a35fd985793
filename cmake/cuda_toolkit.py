"""Finds the CUDA toolkit to build with: BAGUA_CUDA=0 wants none, 1 wants one, auto what there is.

As a program it prints the wheels that have to be installed first, if any.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

# nvcc and what it needs, as wheels; all of one minor version, or they do not fit together.
WHEELS = [
    f"nvidia-{part}==13.0.*"
    for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")
]
FIRST_DRIVER = 580  # that runs what these compile


def toolkit() -> Path | None:
    """The CUDA toolkit to build with: that of nvcc in CUDA_HOME or on PATH, or the wheels.

    Versions before 12 are as good as none.
    """
    if wanted() == "0":
        return None
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for folders in (f"{named}/bin" if named else "", os.environ.get("PATH", os.defpath)):
        nvcc = shutil.which("nvcc", path=folders)
        if not nvcc or cuda_version(nvcc) < 12:
            continue
        # It may be a script that calls another.
        lines = subprocess.run(
            [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True
        ).stderr.splitlines()
        tops = [line.partition("TOP=")[2] for line in lines if "TOP=" in line]
        if tops:
            return Path(tops[0]).resolve()
    try:
        files = metadata.distribution("nvidia-cuda-nvcc").files or ()
        found = [file for file in files if file.parts[-2:] == ("bin", "nvcc")]
        return Path(str(found[0].locate())).resolve().parent.parent if found else None
    except metadata.PackageNotFoundError:
        return None


def cuda_version(nvcc: str) -> int:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)", text)
    return int(found.group(1)) if found else 0


def wanted() -> str:
    text = os.environ.get("BAGUA_CUDA") or "auto"
    if text not in ("0", "1", "auto"):
        raise SystemExit(f"BAGUA_CUDA={text}: it is 0, 1 or auto, which builds for GPUs if it can")
    return text


def driver_version() -> int:
    """The first number of NVIDIA's. 0: there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return 0
    found = re.search(r"\s(\d+)\.\d+", text)
    return int(found.group(1)) if found else 0


def missing_wheels() -> list[str]:
    """Where there is no nvcc it comes from PyPI, if it is wanted or there is a GPU to use it on."""
    if wanted() == "0" or toolkit() is not None:
        return []
    driver = driver_version()
    if 0 < driver < FIRST_DRIVER:
        why = (
            f"there is no nvcc of CUDA 12 or newer, and the driver here, {driver}, does not run "
            f"what PyPI's compiles, which takes {FIRST_DRIVER}: set CUDA_HOME to a toolkit of CUDA "
            "12, or update the driver"
        )
        if wanted() == "1":
            raise SystemExit(f"BAGUA_CUDA=1, but {why}")
        print(f"bagua is built without GPUs: {why}", file=sys.stderr)
        return []
    return WHEELS if wanted() == "1" or driver else []


def checked_toolkit() -> Path | None:
    """As toolkit(), but without one that is wanted there is no building."""
    root = toolkit()
    if wanted() == "1" and root is None:
        raise SystemExit(
            "BAGUA_CUDA=1, but there is no nvcc of version 12 or newer: set CUDA_HOME, or "
            f"pip install {' '.join(WHEELS)}"
        )
    return root


if __name__ == "__main__":
    print(*missing_wheels(), sep="\n")
