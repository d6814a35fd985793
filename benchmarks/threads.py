"""What a training step costs each thread: the engine's own must not take the model's time.

    python -m benchmarks threads
    bagua-run -np 2 python -m benchmarks.threads

The 40 MB MLP of the other benchmarks, with each setting of `overlap`, in turns with the same
without communication. Of rank 0, which also coordinates: milliseconds of a step, and milliseconds
of CPU in a step of the program's threads, of the engine's coordination thread and of its helpers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from mpi4py import MPI

import bagua.torch
from benchmarks.models import mlp, step

TURNS, STEPS = 5, 5  # turns of each, steps of a turn
ENGINE = {"bagua": "engine", "bagua helper": "helpers"}  # by the names they have

Costs = dict[str, float]  # of a step, in milliseconds: "step" on the clock, others of CPU


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


def turn(run: Callable[[], None], steps: int) -> Costs:
    """Of so many steps together."""
    run()  # finds the caches full of somebody else's data
    bagua.torch.barrier()
    before, start = cpu_ms(), time.perf_counter()
    for _ in range(steps):
        run()
    costs = {"step": (time.perf_counter() - start) * 1e3, "program": 0.0, "engine": 0.0}
    costs["helpers"] = 0.0
    for name, ms in cpu_ms().items():
        costs[ENGINE.get(name, "program")] += ms - before.get(name, 0.0)
    return costs


def measure(overlap: str, turns: int) -> dict[str, Costs]:
    """The means of all turns."""
    bagua.torch.init(overlap=overlap)
    runs = {"alone": trainer(False), f"overlap {overlap}": trainer(True)}
    for run in runs.values():
        turn(run, STEPS)
    taken: dict[str, list[Costs]] = {label: [] for label in runs}
    for _ in range(turns):
        for label, run in runs.items():
            taken[label].append(turn(run, STEPS))
    bagua.torch.shutdown()
    return {
        label: {what: sum(c[what] for c in costs) / (turns * STEPS) for what in costs[0]}
        for label, costs in taken.items()
    }


def table(results: list[dict[str, Costs]]) -> str:
    columns = [*next(iter(results[0].values())), "adds"]
    lines = [f"{'':<16}" + "".join(f"{column:>10}" for column in columns) + "   (ms a step)"]
    for figures in results:
        for label, costs in figures.items():
            adds = costs["step"] - figures["alone"]["step"]
            told = [*costs.values(), *([] if label == "alone" else [adds])]
            lines.append(f"{label:<16}" + "".join(f"{value:>10.2f}" for value in told))
    about = "step, adds: time; the others: CPU, of rank 0. adds: what is more than the row above."
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads")
    parser.add_argument("--quick", action="store_true", help="one turn of everything")
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = 1 if options.quick else TURNS
    results = [measure(overlap, turns) for overlap in ("always", "never", "auto")]
    if MPI.COMM_WORLD.rank == 0:
        print(table(results))
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
            print(f"written: {options.output}")


if __name__ == "__main__":
    main()
