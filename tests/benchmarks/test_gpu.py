"""What benchmarks/gpu.py makes of a trace and of figures, and of a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bagua.torch as hvd
from benchmarks.gpu import bucket, buckets, table_of_exchanges, table_of_kernels, waits_in


def test_calls_that_wait_are_counted_between_the_steps_only():
    events = [
        ("cudaDeviceSynchronize", 1, 2),
        ("steps", 5, 50),
        ("aten::add", 6, 7),
        ("cudaLaunchKernel", 6, 7),
        ("cudaMemcpyAsync", 7, 8),
        ("cudaStreamSynchronize", 9, 12),
        ("cudaMalloc", 20, 21),
        ("cudaMalloc", 30, 31),
        ("cuStreamSynchronize", 40, 41),
        ("cudaDeviceSynchronize", 60, 61),
    ]
    expected = {"cudaStreamSynchronize": 1, "cudaMalloc": 2, "cuStreamSynchronize": 1}
    assert waits_in(events) == expected


def spaced(table: str) -> list[str]:
    return [" ".join(line.split()) for line in table.splitlines()]


def test_tables():
    kernels = {
        "copy": {"seconds": 50e-6, "bytes": 200_000_000},
        "minmax_u8 encode": {"seconds": 40e-6, "bytes": 125_000_000},
    }
    assert spaced(table_of_kernels(kernels))[1:3] == [
        "copy 50.0 us 4.00 TB/s 50.0 us 1.00 x",
        "minmax_u8 encode 40.0 us 3.12 TB/s 31.2 us 1.28 x",
    ]
    exchanges = {"bucket 64 KB, engine": {"median_s": 14e-6}, "waits of a step": {}}
    assert spaced(table_of_exchanges(2, exchanges)) == [
        "2 ranks",
        "bucket 64 KB, engine 0.014 ms",
        "the host waits in a step: never",
    ]


@pytest.mark.ranks(2)
def test_buckets_are_summed():
    hvd.init()
    figures = buckets(None, count=2, rounds=1, turn=1, device="cpu")
    assert list(figures) == ["bucket 64 KB", "bucket 1024 KB", "bucket 25600 KB"]
    assert all(figure["median_s"] > 0 for figure in figures.values())
    run, values = bucket("mine", 4000, "cpu")
    values.fill_(hvd.rank() + 1)
    run()
    assert (values == 3).all()


def test_nothing_is_measured_without_a_gpu():
    root = Path(__file__).resolve().parents[2]
    results = root / "benchmarks" / "results"
    before = sorted(results.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=root,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "there is no GPU here, so there is nothing to measure\n"
    assert sorted(results.rglob("*")) == before
