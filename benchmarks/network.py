"""Allreduces over slow links: every collective that can do it, at several sizes.

    python -m benchmarks.network --hosts 2 --ranks 2 --rate 1gbit

For each: milliseconds, and megabytes that a host sent. The rest of a link's time is idle: a link of
1 Gbit/s carries 125 MB/s each way. Hosts are network namespaces, see hosts.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.hosts import Hosts, sent_nbytes
from benchmarks.plots import FOLDER

COLLECTIVES = ("auto", "hierarchical", "scatter_reduce", "ring", "halving", "gather_reduce")
SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
LARGEST_GATHER = 256 << 10  # beyond, gather_reduce takes forever and proves nothing

Figures = dict[str, dict[str, tuple[float, float]]]  # size, collective: seconds, bytes per host


def measure(collective: str) -> dict[str, tuple[float, float]]:
    """On every rank: the slowest rank's median seconds, and the bytes of the busiest host."""
    import torch
    from mpi4py import MPI

    import bagua.torch

    torch.set_num_threads(1)
    bagua.torch.init(allreduce=collective)
    comm = MPI.COMM_WORLD
    figures = {}
    for nbytes in SIZES:
        if collective == "gather_reduce" and nbytes > LARGEST_GATHER:
            continue
        tensor = bagua.torch.empty_shared(nbytes // 4).zero_()
        times, before = [], 0
        rounds = 40 if nbytes <= 64 << 10 else 5
        for number in range(rounds + 2):
            comm.Barrier()
            if number == 2:
                before = sent_nbytes()
            start = time.perf_counter()
            bagua.torch.allreduce_(tensor, name=f"t{nbytes}", op=bagua.torch.Sum)
            times.append(time.perf_counter() - start)
        comm.Barrier()
        sent = (sent_nbytes() - before) / rounds
        median = statistics.median(times[2:])
        figures[str(nbytes)] = (comm.allreduce(median, MPI.MAX), comm.allreduce(sent, MPI.MAX))
    return figures


def table(figures: Figures) -> str:
    columns = list(next(iter(figures.values())))
    lines = [f"{'bytes':>10}" + "".join(f"{name:>22}" for name in columns)]
    for nbytes, row in figures.items():
        cells = (
            f"{row[name][0] * 1e3:10.2f} ms {row[name][1] / 1e6:6.2f} MB" if name in row else ""
            for name in columns
        )
        lines.append(f"{nbytes:>10}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on every host")
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc takes it")
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        collective, output = options.as_rank
        mine = measure(collective)
        if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
            Path(output).write_text(json.dumps(mine))
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    figures: Figures = {}
    output = FOLDER / "network.rank.json"
    with Hosts(options.hosts, options.rate) as hosts, hosts.mpirun(options.ranks) as mpirun:
        for collective in COLLECTIVES:
            program = [sys.executable, "-m", "benchmarks.network", "--as-rank"]
            subprocess.run([*mpirun, *program, collective, str(output)], check=True)
            for nbytes, figure in json.loads(output.read_text()).items():
                figures.setdefault(nbytes, {})[collective] = figure
            output.unlink()
    print(f"{options.hosts} hosts x {options.ranks} ranks, links of {options.rate}")
    print(table(figures))
    path = FOLDER / f"network.{options.hosts}x{options.ranks}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
