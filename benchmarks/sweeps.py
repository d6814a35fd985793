"""How costs grow: with the size of a tensor, the number of ranks and the number of tensors.

python -m benchmarks.sweeps                 all three; tables, JSON and PNG in build/bench
python -m benchmarks.sweeps sizes           against the peers, as a plot
python -m benchmarks.sweeps ranks tensors
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.plots import FOLDER, find_pyplot
from benchmarks.ranks import on_ranks

SIZES = tuple(4**power for power in range(1, 14))  # bytes: 4 to 64 MB
RANKS = (2, 3, 4, 6, 8)
TENSORS = (10, 100, 500, 1000, 3000, 10000)

Figures = dict[str, dict[str, float]]  # by what is varied, then by system: seconds


def sizes(quick: bool) -> Figures:
    """An allreduce of one tensor; memcpy is all ranks copying as much at once."""
    from mpi4py import MPI

    import bagua.torch
    from benchmarks.measure import interleaved
    from benchmarks.peers import all_peers, turns, zeros

    bagua.torch.init()
    comm = MPI.COMM_WORLD
    peers = {name: peer for name, peer in all_peers(comm).items() if hasattr(peer, "allreduce")}
    figures: Figures = {}
    for nbytes in SIZES:
        tensor, other = zeros(nbytes // 4), zeros(nbytes // 4)
        arena = bagua.torch.empty_shared(nbytes // 4).zero_()
        runs = {n: partial(peer.allreduce, tensor, f"s{nbytes}") for n, peer in peers.items()}
        runs["bagua arena"] = partial(peers["bagua"].allreduce, arena, f"a{nbytes}")
        runs["memcpy"] = partial(other.copy_, tensor)
        rounds = 1 if quick else 20 if nbytes <= 1 << 16 else 6 if nbytes <= 1 << 22 else 3
        figures[str(nbytes)] = medians(
            interleaved(runs, rounds, comm.Barrier, turns=turns(peers)), comm
        )
    return figures


def ranks(quick: bool) -> Figures:
    """One element, 1 MB and 16 MB, with as many ranks as there are."""
    from mpi4py import MPI

    import bagua.torch
    from benchmarks.measure import interleaved
    from benchmarks.peers import Bagua, Gloo, zeros

    bagua.torch.init()
    comm = MPI.COMM_WORLD
    peers = {"bagua": Bagua(), "gloo": Gloo(comm)}
    figures: Figures = {}
    for label, count in (("1 element", 1), ("1 MB", 1 << 18), ("16 MB", 1 << 22)):
        tensor = zeros(count)
        runs = {
            f"{name}, {label}": partial(peer.allreduce, tensor, label)
            for name, peer in peers.items()
        }
        rounds = 1 if quick else 10 if count == 1 else 4
        figures.setdefault(str(comm.size), {}).update(
            medians(interleaved(runs, rounds, comm.Barrier), comm)
        )
    return figures


def tensors(quick: bool) -> Figures:
    """Tensors of 4 KB: started one by one, in one call, and as gradients of a step."""
    import torch
    from mpi4py import MPI

    import bagua.torch
    from benchmarks.measure import interleaved
    from benchmarks.models import ManyParameters, steps
    from benchmarks.peers import Alone, Bagua, zeros

    bagua.torch.init()
    comm = MPI.COMM_WORLD
    peer = Bagua()
    figures: Figures = {}
    for count in TENSORS:
        many = [zeros(1024) for _ in range(count)]
        runs: dict[str, Any] = {
            "by name": partial(peer.allreduce_many, many),
            "grouped": partial(
                bagua.torch.grouped_allreduce_, many, name=f"g{count}", op=bagua.torch.Sum
            ),
        }
        systems = {"step": peer, "step alone": Alone()}
        runs.update(steps(systems, partial(ManyParameters, count), torch.ones(1)))
        rounds = 1 if quick else 10 if count <= 1000 else 3
        figures[str(count)] = medians(interleaved(runs, rounds, comm.Barrier), comm)
    return figures


def medians(results: dict[str, dict[str, float]], comm: Any) -> dict[str, float]:
    """Of the slowest rank."""
    everyone = comm.allgather(results)
    return {name: max(mine[name]["median_s"] for mine in everyone) for name in results}


SWEEPS = {"sizes": sizes, "ranks": ranks, "tensors": tensors}


def run(sweep: str, nps: tuple[int, ...], folder: Path, quick: bool) -> None:
    """Measures with each of these numbers of ranks, prints the table, writes JSON and plot."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: Figures = {}
    for np in nps:
        figures.update(launch(sweep, np, folder, quick))
    print(f"\n{SWEEPS[sweep].__doc__}\n{table(figures, sweep)}")
    (folder / f"{sweep}.json").write_text(json.dumps(figures, indent=1) + "\n")
    if sweep == "sizes":
        plot(figures, f"Allreduce between {nps[0]} ranks of one machine", folder / "sizes.png")
    print(f"written: {folder / sweep}.*")


def launch(sweep: str, np: int, folder: Path, quick: bool) -> Figures:
    """Runs a sweep on so many ranks, in processes of their own."""
    output = folder / f"{sweep}.{np}.json"
    output.unlink(missing_ok=True)
    arguments = [sweep, "--as-rank", str(output), *(["--quick"] if quick else [])]
    if code := on_ranks(np, "benchmarks.sweeps", *arguments):
        sys.exit(code)
    figures: Figures = json.loads(output.read_text())
    output.unlink()
    return figures


def table(figures: Figures, what: str) -> str:
    """A row for each value, a column for each system; milliseconds."""
    systems = list(next(iter(figures.values())))
    widths = [max(10, len(system) + 2) for system in systems]
    lines = [f"{what:>10}" + "".join(f"{s:>{w}}" for s, w in zip(systems, widths)) + "   (ms)"]
    for value, row in figures.items():
        cells = (f"{row[system] * 1e3:>{width}.3f}" for system, width in zip(systems, widths))
        lines.append(f"{value:>10}" + "".join(cells))
    return "\n".join(lines)


def plot(figures: Figures, title: str, path: Path) -> None:
    """Time against size, both logarithmic, one line a system."""
    if (pyplot := find_pyplot()) is None:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for system in next(iter(figures.values())):
        points = [(int(nbytes), row[system] * 1e3) for nbytes, row in figures.items()]
        style = "k--" if system == "memcpy" else "o-"
        axes.loglog(*zip(*points), style, label=system, markersize=3)
    axes.set_xlabel("bytes")
    axes.set_ylabel("milliseconds")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweeps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sweeps", nargs="*", default=list(SWEEPS), metavar="sweep")
    parser.add_argument("--quick", action="store_true", help="one round of everything")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.sweeps) - set(SWEEPS):
        parser.error(f"no sweep is called {', '.join(sorted(unknown))}; known: {', '.join(SWEEPS)}")
    if options.as_rank:
        return as_rank(options.sweeps[0], options.quick, options.as_rank)
    for sweep in options.sweeps:
        run(sweep, RANKS if sweep == "ranks" else (2,), FOLDER, options.quick)
    return 0


def as_rank(sweep: str, quick: bool, output: Path) -> int:
    import torch

    import bagua.torch

    torch.set_num_threads(1)
    figures = SWEEPS[sweep](quick)
    if bagua.torch.rank() == 0:
        output.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
