"""Which toolkit a build takes, and which GPUs it is for."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest

from bagua.common.core import core

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("cuda_toolkit", ROOT / "cmake" / "cuda_toolkit.py")
assert _spec is not None
assert _spec.loader is not None
cuda_toolkit = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cuda_toolkit)


def kernels_in(extension: bytes) -> list[set[tuple[str, int]]]:
    """By source: what there is of its kernels, and for which architectures."""
    fat_binary = struct.Struct("<IHHQ")  # its magic number, version, and what it and the rest take
    entry = struct.Struct("<HHIQ")  # its kind, version, and what it and its code take
    sources, at = [], 0
    while (at := extension.find(struct.pack("<I", 0xBA55ED50), at)) >= 0:
        _, _, nbytes, rest = fat_binary.unpack_from(extension, at)
        at += nbytes
        end, kernels = at + rest, set()
        while at < end:
            kind, _, nbytes, code = entry.unpack_from(extension, at)
            (arch,) = struct.unpack_from("<I", extension, at + 28)
            kernels.add(({1: "ptx", 2: "sm"}[kind], arch))
            at += nbytes + code
        sources.append(kernels)
    return sources


def test_kernels_are_for_all_of_these_gpus_and_newer_ones():
    built = core.build_info()["cuda"]
    sources = kernels_in(Path(core.__file__).read_bytes())
    if built == "not built":
        assert not sources
        return
    archs = [80, 90, 100] if tuple(map(int, built.split("."))) >= (12, 8) else [80, 90]
    expected = {*(("sm", arch) for arch in archs), ("ptx", archs[-1])}
    assert sources == [expected] * len(list((ROOT / "csrc").rglob("*.cu")))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes a toolkit of some version there, and an environment without any."""
    for name in ("CUDA_HOME", "CUDA_PATH", "BAGUA_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setattr(cuda_toolkit, "driver_version", lambda: 0)

    def no_wheel(name):
        raise cuda_toolkit.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cuda_toolkit.metadata, "distribution", no_wheel)

    def make(place, version):
        nvcc = tmp_path / place / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        told = f"echo release {version} || echo TOP={tmp_path / place} >&2"
        nvcc.write_text(f"#!/bin/sh\n[ $1 = --version ] && {told}\n")
        nvcc.chmod(0o755)
        return tmp_path / place

    return make


def test_the_first_that_is_new_enough(machine, tmp_path, monkeypatch):
    assert cuda_toolkit.toolkit() is None
    on_path = machine("path", "13.0")
    assert cuda_toolkit.toolkit() == on_path
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    assert cuda_toolkit.toolkit() == on_path
    monkeypatch.setenv("CUDA_HOME", str(machine("old", "11.8")))
    assert cuda_toolkit.toolkit() == on_path
    monkeypatch.setenv("CUDA_HOME", str(machine("named", "12.4")))
    assert cuda_toolkit.toolkit() == tmp_path / "named"
    monkeypatch.setenv("BAGUA_CUDA", "0")
    assert cuda_toolkit.toolkit() is None


@pytest.mark.parametrize(
    ("wanted", "driver", "comes"),
    [("", 0, False), ("auto", 580, True), ("1", 0, True), ("1", 610, True), ("0", 580, False)],
)
def test_nvcc_comes_from_wheels_where_it_is_wanted(machine, monkeypatch, wanted, driver, comes):
    monkeypatch.setenv("BAGUA_CUDA", wanted)
    monkeypatch.setattr(cuda_toolkit, "driver_version", lambda: driver)
    assert cuda_toolkit.missing_wheels() == (cuda_toolkit.WHEELS if comes else [])
    machine("path", "13.0")
    assert cuda_toolkit.missing_wheels() == []


def test_a_driver_that_would_not_run_what_wheels_compile(machine, monkeypatch, capsys):
    monkeypatch.setattr(cuda_toolkit, "driver_version", lambda: 550)
    assert cuda_toolkit.missing_wheels() == []
    assert "without GPUs: there is no nvcc" in capsys.readouterr().err
    monkeypatch.setenv("BAGUA_CUDA", "1")
    with pytest.raises(SystemExit, match="the driver here, 550, does not run"):
        cuda_toolkit.missing_wheels()
    machine("path", "12.4")
    assert cuda_toolkit.missing_wheels() == []


def test_what_is_no_choice(monkeypatch):
    monkeypatch.setenv("BAGUA_CUDA", "nonsense")
    with pytest.raises(SystemExit, match="BAGUA_CUDA=nonsense: it is 0, 1 or auto"):
        cuda_toolkit.wanted()
