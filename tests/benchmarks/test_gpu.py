"""What benchmarks/gpu.py makes of a trace and of figures, and of a machine without a GPU."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bagua.torch as hvd
from benchmarks.gpu import Bucket, buckets, table_of_exchanges, table_of_kernels, waits_in


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
    exchanges = {
        "step": {"median_s": 2.5e-3},
        "bucket 64 KB, engine": {"median_s": 14e-6, "host_s": 4.2e-6},
        "waits of a step": {},
    }
    assert spaced(table_of_exchanges(2, exchanges)) == [
        "2 ranks",
        "step 2.500 ms",
        "bucket 64 KB, engine 0.014 ms given within 4.2 us",
        "the host waits in a step: never",
    ]


class Doubling:
    """NCCL of two ranks that have the same."""

    def sum(self, values):
        return lambda: time.sleep(1e-3) or values.mul_(2)


@pytest.mark.ranks(2)
def test_buckets_are_summed():
    hvd.init()
    figures = buckets(Doubling(), count=2, rounds=1, turn=1, device="cpu")
    sizes = ["bucket 64 KB", "bucket 1024 KB", "bucket 25600 KB"]
    measured = [f"{size}{how}" for size in sizes for how in ("", ", together", ", nccl")]
    over = [f"{size}{how}" for size in sizes for how in (", engine", ", together, engine")]
    assert list(figures) == measured + over
    for size in sizes:
        alone = figures[f"{size}, nccl"]
        assert min(alone["median_s"], alone["host_s"]) >= 1e-3
        for how in ("", ", together"):
            for key in ("median_s", "host_s"):
                exchange, difference = figures[size + how], figures[f"{size}{how}, engine"]
                assert difference[key] == exchange[key] - alone[key]
    mine = Bucket("mine", 4000, "cpu")
    mine.values.fill_(hvd.rank() + 1)
    mine.launch().wait()
    assert (mine.values == 3).all()


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
