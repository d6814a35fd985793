"""Allreduces over slow links: every collective that can do it, at several sizes.

    python -m benchmarks.network --hosts 2 --ranks 2 --rate 1gbit

Hosts are network namespaces, see hosts.py. For each size: what an exact allreduce takes at least,
and what a flat ring takes that goes through all ranks, host by host. Then for each collective its
time, what the busiest host sent, how often that is the least possible, and how busy its link was.

N bytes between k hosts: every host must send 2 (k-1)/k N, which for two hosts is N. In a flat ring
of n ranks one rank of each host sends to the next host: 2 (n-1)/n N; or, with --dealt, all of them
do. Both are payload alone. What
was sent is what the link counts: with the headers of every packet, 4.6 % where segments are full,
and with what ranks say to each other, the barrier before each run among it. Busy is its share of
what the link could have carried in that time: its rate, and the burst that an idle one has saved.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from benchmarks.hosts import Hosts, Link
from benchmarks.plots import FOLDER

if TYPE_CHECKING:
    import torch

COLLECTIVES = ("auto", "hierarchical", "scatter_reduce", "ring", "halving", "gather_reduce")
SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
LARGEST_GATHER = 256 << 10  # beyond, gather_reduce takes forever and proves nothing


@dataclass
class Figure:
    seconds: float  # the slowest rank's median
    sent_nbytes: float  # by the busiest host, in a run
    bytes_per_s: float  # what a link carries
    burst_nbytes: float  # and at once, if it has been idle

    def busy(self) -> float:
        return self.sent_nbytes / (self.bytes_per_s * self.seconds + self.burst_nbytes)


Figures = dict[str, dict[str, Figure]]  # by size, then by collective


def least(nbytes: int, hosts: int) -> float:
    """Payload that each host must send, whatever the collective, for the result to be exact."""
    return 2 * (hosts - 1) / hosts * nbytes


def flat_ring(nbytes: int, hosts: int, ranks: int, dealt: bool = False) -> float:
    """Payload that each host sends in a ring of all ranks: `ranks` on each host, side by side or
    dealt out one by one, so that nobody's neighbors are on its own host.
    """
    leaving = ranks if dealt else 1
    return leaving * least(nbytes, hosts * ranks) if hosts > 1 else 0.0


def verify(
    allreduce: Callable[[torch.Tensor], object], tensor: torch.Tensor, rank: int, ranks: int
) -> None:
    """Raises if the sum of numbers that differ by place and by rank is wrong; leaves zeros."""
    import torch

    places = torch.arange(tensor.numel(), dtype=torch.float32) % 1009  # all sums are exact
    allreduce(tensor.copy_(places).add_(rank))
    wrong = int((tensor != ranks * places + ranks * (ranks - 1) // 2).sum())
    if wrong:
        raise RuntimeError(f"rank {rank}: {wrong} of {tensor.numel()} sums are wrong")
    tensor.zero_()  # what is summed again and again stays finite


def measure(collective: str, sizes: list[int]) -> dict[str, Figure]:
    """On every rank."""
    import torch
    from mpi4py import MPI

    import bagua.torch

    torch.set_num_threads(1)
    bagua.torch.init(allreduce=collective)
    comm = MPI.COMM_WORLD
    figures = {}
    for nbytes in sizes:
        if collective == "gather_reduce" and nbytes > LARGEST_GATHER:
            continue
        tensor = bagua.torch.empty_shared(nbytes // 4)
        allreduce_ = partial(bagua.torch.allreduce_, name=f"t{nbytes}", op=bagua.torch.Sum)
        verify(allreduce_, tensor, comm.rank, comm.size)
        times = []
        before = Link.now()
        rounds = 40 if nbytes <= 64 << 10 else 15
        for number in range(rounds + 2):
            comm.Barrier()
            if number == 2:
                before = Link.now()
                comm.Barrier()  # it takes a while to ask
            start = time.perf_counter()
            allreduce_(tensor)
            times.append(time.perf_counter() - start)
        comm.Barrier()
        sent = (Link.now().sent_nbytes - before.sent_nbytes) / rounds
        median = statistics.median(times[2:])
        figures[str(nbytes)] = Figure(
            comm.allreduce(median, MPI.MAX),
            comm.allreduce(sent, MPI.MAX),
            before.bytes_per_s,
            before.burst_nbytes,
        )
    return figures


def report(figures: Figures, hosts: int, ranks: int, dealt: bool = False) -> str:
    lines = []
    for size, row in figures.items():
        nbytes = int(size)
        lowest, ring = least(nbytes, hosts), flat_ring(nbytes, hosts, ranks, dealt)
        at_best_s = lowest / next(iter(row.values())).bytes_per_s
        lines += [
            f"{nbytes} bytes: a host must send {shown(lowest)}, in {at_best_s * 1e3:.2f} ms; "
            f"a flat ring of {hosts * ranks} ranks: {shown(ring)}"
        ]
        for name, figure in row.items():
            more = f"{figure.sent_nbytes / lowest:>9.2f} x the least" if lowest else ""
            lines += [
                f"  {name:<16}{figure.seconds * 1e3:>10.2f} ms{shown(figure.sent_nbytes):>14}{more}"
                f"{figure.busy():>8.1%} busy"
            ]
    lines += [
        "",
        "must, ring: payload. sent: with headers of packets and what else the ranks said.",
        "busy: what was sent, of what the link could have carried in that time.",
    ]
    return "\n".join(lines)


def shown(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.2f} KB"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on every host")
    parser.add_argument("--dealt", action="store_true", help="ranks to hosts, one by one in turns")
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc takes it")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="in bytes")
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        collective, output = options.as_rank
        mine = measure(collective, options.sizes)
        if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
            Path(output).write_text(json.dumps({size: asdict(f) for size, f in mine.items()}))
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    figures: Figures = {}
    output = FOLDER / "network.rank.json"
    sizes = [str(nbytes) for nbytes in options.sizes]
    with (
        Hosts(options.hosts, options.rate) as hosts,
        hosts.mpirun(options.ranks, options.dealt) as mpirun,
    ):
        for collective in COLLECTIVES:
            program = [sys.executable, "-m", "benchmarks.network", "--sizes", *sizes, "--as-rank"]
            subprocess.run([*mpirun, *program, collective, str(output)], check=True)
            for nbytes, figure in json.loads(output.read_text()).items():
                figures.setdefault(nbytes, {})[collective] = Figure(**figure)
            output.unlink()
    placed = ", dealt out one by one" if options.dealt else ""
    print(f"{options.hosts} hosts of {options.ranks} ranks{placed}, links of {options.rate}")
    print(report(figures, options.hosts, options.ranks, options.dealt))
    kind = ".dealt" if options.dealt else ""
    path = FOLDER / f"network.{options.hosts}x{options.ranks}{kind}.json"
    told = {
        size: {name: {**asdict(figure), "busy": figure.busy()} for name, figure in row.items()}
        for size, row in figures.items()
    }
    path.write_text(json.dumps(told, indent=1) + "\n")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
