"""A training step over slow links: every algorithm, beside peers that send what is exact.

    python -m benchmarks.slow_links --hosts 4 --rate 1gbit

Hosts are network namespaces (hosts.py) of one rank each; the model is the MLP of 40 MB, batch 64,
of few large layers or, with --hidden 40, of many smaller ones. Every system has a model of its own
and takes turns of a few steps, in every round of one run. Some exchange in some steps only, or
whenever there is time: their turns are longer, a multiple of their period, and count as a whole;
beside it is the median of their single steps. A step's cost is that of the slowest rank, cpu what
the busiest rank's threads worked, also in the kernel; its bytes are those that the busiest host's
interface sent, and codec is what of it the busiest rank spent on encoding and decoding: where links
are fast, no algorithm should be slower than `gradient_allreduce` by more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bagua.algorithms import Algorithm
from benchmarks.algorithms import add_choice, all_algorithms, check_choice
from benchmarks.hosts import Hosts, sent_nbytes
from benchmarks.measure import Run
from benchmarks.plots import FOLDER, find_pyplot

TURN = 5  # steps
LONG_TURN = 32  # at least, where steps differ
# The exact steps that some begin with are over before anything is measured.
OPTIONS = {
    "diloco": {"every": 16},
    "local_sgd": {"every": 16},
    "powersgd": {"warmup_steps": 2},
    "qadam": {"warmup_steps": 2},
}
PEERS = ("gloo", "horovod")  # those of fp32 that algorithms are compared with


@dataclass
class Figure:
    step_s: float  # all steps of a turn count, where some exchange and some do not
    median_s: float  # of single steps
    sent_nbytes: float  # a step, by a host
    codec_s: float  # a step, by a rank
    cpu_s: float  # a step, by all threads of a rank


class Turns:
    """One system, its model, and what its steps took on this rank."""

    def __init__(
        self, system: Any, hidden: int, inputs: Any, algorithm: Algorithm | None = None
    ) -> None:
        from benchmarks.models import mlp
        from benchmarks.peers import turn_of

        self._turn_of = partial(turn_of, system)
        self._model, self._optimizer = system.trainer(mlp(hidden))
        self._inputs = inputs
        self._times: list[float] = []
        self._steps: list[float] = []
        self._sent: list[float] = []
        self._coded: list[float] = []
        self._cpu: list[float] = []
        every = algorithm.every if algorithm else 1
        self._in_background = algorithm is not None and algorithm.when == "background"
        self._steps_differ = every > 1 or self._in_background
        self._turn = -(-LONG_TURN // every) * every if self._steps_differ else TURN

    def take(self, meet: Run, counts: bool) -> None:
        """The first step finds the caches full of somebody else's data and is not counted."""
        with self._turn_of():
            self._take(meet, counts)

    def _take(self, meet: Run, counts: bool) -> None:
        from benchmarks.models import step

        step(self._model, self._optimizer, self._inputs)
        _wait_for_silence()
        meet()
        before, coded_before, times = sent_nbytes(), _codec_s(), []
        cpu_before = time.process_time()
        for _ in range(self._turn):
            start = time.perf_counter()
            step(self._model, self._optimizer, self._inputs)
            times.append(time.perf_counter() - start)
        _wait_for_silence()
        if counts:
            self._steps += times
            self._times += [statistics.fmean(times)] if self._steps_differ else times
            self._sent.append((sent_nbytes() - before) / self._turn)
            self._coded.append((_codec_s() - coded_before) / self._turn)
            self._cpu.append((time.process_time() - cpu_before) / self._turn)
        if self._in_background:
            self._optimizer.settle()  # some ranks have begun what others would in their next turn
            _wait_for_silence()
        meet()

    def end(self) -> Figure:
        if hasattr(self._optimizer, "settle"):
            self._optimizer.settle()
        means = map(statistics.fmean, (self._sent, self._coded, self._cpu))
        return Figure(*map(statistics.median, (self._times, self._steps)), *means)


def _codec_s() -> float:
    import bagua.torch

    return bagua.torch.counters()["codec_us"] / 1e6


def _wait_for_silence() -> None:
    """What goes on in the background must not take another system's link."""
    before = -1
    while (now := sent_nbytes()) > before + 10_000:  # ranks may have a word with each other
        before = now
        time.sleep(0.05)


def measure(names: list[str], rounds: int, hidden: int, address: str) -> dict[str, Figure]:
    """On every rank. They meet by gloo: a barrier of MPI's, while Horovod's thread uses MPI between
    hosts, now and then never ends.
    """
    import torch
    from mpi4py import MPI

    import bagua.torch
    from benchmarks.peers import Alone, Bagua, Gloo, horovods

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    bagua.torch.init()
    comm = MPI.COMM_WORLD
    torch.manual_seed(comm.rank)
    inputs = torch.randn(64, 784)
    others: list[Any] = [Alone(), Gloo(comm, address), *horovods()]
    systems = {other.name: Turns(other, hidden, inputs) for other in others}
    for name, algorithm in all_algorithms(OPTIONS).items():
        if name in names:
            systems[name] = Turns(Bagua(algorithm), hidden, inputs, algorithm)
    for number in range(1 + rounds):
        for turns in systems.values():
            turns.take(torch.distributed.barrier, number > 0)
    mine = {name: turns.end() for name, turns in systems.items()}
    everyone = comm.allgather(mine)
    return {
        name: Figure(*map(max, zip(*(astuple(figures[name]) for figures in everyone))))
        for name in mine
    }


def added(figures: dict[str, Figure]) -> dict[str, float]:
    """Seconds that communication adds to a step."""
    alone = figures["alone"].step_s
    return {name: f.step_s - alone for name, f in figures.items() if name != "alone"}


def table(figures: dict[str, Figure]) -> str:
    adds = added(figures)
    best = min((name for name in PEERS if name in figures), key=lambda name: adds[name])
    width = max(map(len, figures)) + 2
    lines = [
        f"{'system':<{width}}{'step':>11}{'median':>11}{'cpu':>11}{'adds':>12}{'sent':>12}"
        f"{'codec':>11}   less than {best}"
    ]
    alone = figures["alone"]
    for name, figure in figures.items():
        times = (figure.step_s, figure.median_s, figure.cpu_s)
        line = f"{name:<{width}}" + "".join(f"{s * 1e3:>8.1f} ms" for s in times)
        if name in adds:
            less = f"{adds[best] / adds[name]:.2f} x" if adds[name] > 0 else "lost in noise"
            line += f"{adds[name] * 1e3:>9.1f} ms{figure.sent_nbytes / 1e6:>9.2f} MB"
            line += f"{figure.codec_s * 1e3:>8.1f} ms   {less}"
            mean, median = figure.step_s / alone.step_s, figure.median_s / alone.median_s
            line += f"; {mean:.2f} x alone, by medians {median:.2f} x"
        lines.append(line)
    return "\n".join(lines)


def plot(figures: dict[str, Figure], title: str, path: Path) -> None:
    """A bar a system: the step alone, and what communication adds."""
    if (pyplot := find_pyplot()) is None:
        return
    adds, alone = added(figures), figures["alone"].step_s
    names = sorted(adds, key=lambda name: adds[name], reverse=True)
    colors = ["tab:red" if name in PEERS else "tab:blue" for name in names]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.35 * len(names)))
    axes.barh(names, alone * 1e3, color="lightgray")
    longer = [max(0.0, adds[name]) * 1e3 for name in names]
    bars = axes.barh(names, longer, left=alone * 1e3, color=colors)
    labels = [f"+{adds[n] * 1e3:.0f} ms, {figures[n].sent_nbytes / 1e6:.1f} MB" for n in names]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.set_xlabel("milliseconds a step; gray: without communication; bytes: sent by a host")
    axes.set_title(title)
    axes.margins(x=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc takes it")
    parser.add_argument("--hidden", type=int, default=3, help="hidden layers of the model")
    parser.add_argument("--rounds", type=int, default=5)
    add_choice(parser)
    parser.add_argument("--as-rank", nargs=2, metavar=("ADDRESS", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    check_choice(parser, options.algorithms)
    names = options.algorithms or list(all_algorithms({}))
    if options.as_rank:
        address, output = options.as_rank
        mine = measure(names, options.rounds, options.hidden, address)
        if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
            Path(output).write_text(json.dumps({name: asdict(f) for name, f in mine.items()}))
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    kind = "" if options.hidden == 3 else f".{options.hidden}_layers"
    path = FOLDER / f"slow_links.{options.hosts}x{options.rate}{kind}.json"
    path.unlink(missing_ok=True)
    with Hosts(options.hosts, options.rate) as hosts, hosts.mpirun(1) as mpirun:
        program = [sys.executable, "-m", "benchmarks.slow_links", "--algorithms", *names]
        program += ["--hidden", str(options.hidden), "--rounds", str(options.rounds)]
        program += ["--as-rank", hosts.address(0), str(path)]
        subprocess.run([*mpirun, *program], check=True)
    figures = {name: Figure(**f) for name, f in json.loads(path.read_text()).items()}
    title = f"{options.hosts} hosts of 1 rank, links of {options.rate}"
    title += kind and f", {options.hidden} hidden layers"
    print(f"{title}\n{table(figures)}")
    plot(figures, title, path.with_suffix(".png"))
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
