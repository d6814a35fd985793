"""What a training step costs each thread: the engine's own must not take the model's time.

    bagua-run -np 2 python -m benchmarks.threads

The 40 MB MLP of the other benchmarks, without communication and with each setting of `overlap`:
milliseconds per step, and of CPU per step of the program's thread and of the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import bagua.torch
from benchmarks.models import mlp, step

STEPS = 40


def cpu_ms() -> dict[str, float]:
    """Of every thread of this process, by name; threads of one name together."""
    used: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        nanoseconds = int((task / "schedstat").read_text().split()[0])
        used[name] = used.get(name, 0.0) + nanoseconds / 1e6
    return used


def trainer(distributed: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model, inputs = mlp(), torch.randn(64, 784)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if distributed:
        optimizer = bagua.torch.DistributedOptimizer(optimizer, model.named_parameters())
    return partial(step, model, optimizer, inputs)


def measure(label: str, run: Callable[[], None]) -> None:
    for _ in range(5):
        run()
    bagua.torch.barrier()
    before, start = cpu_ms(), time.perf_counter()
    for _ in range(STEPS):
        run()
    elapsed = (time.perf_counter() - start) * 1e3 / STEPS
    used = {name: (ms - before.get(name, 0.0)) / STEPS for name, ms in cpu_ms().items()}
    engine = used.pop("bagua", 0.0)
    if bagua.torch.rank() == 0:
        rest = sum(used.values())
        print(f"{label:16} step {elapsed:6.1f}   program {rest:6.1f}   engine {engine:6.2f}")


def main() -> None:
    torch.set_num_threads(1)
    for overlap in ("always", "never"):
        bagua.torch.init(overlap=overlap)
        measure("alone", trainer(False))
        measure(f"overlap {overlap}", trainer(True))
        bagua.torch.shutdown()


if __name__ == "__main__":
    main()
