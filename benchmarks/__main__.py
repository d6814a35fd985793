"""`python -m benchmarks`: starts the ranks, prints tables, writes JSON files and a plot.

python -m benchmarks                     every case, 2 ranks: a minute or two
python -m benchmarks latency training    these cases
python -m benchmarks sizes               time against size, drawn in build/bench/sizes.png
python -m benchmarks --quick             a few rounds, to see that it runs
python -m benchmarks codecs --every-isa  with every instruction set that the processor has

The codecs are measured in this process, everything else by ranks. `sizes` is one of the sweeps (see
sweeps.py), `threads` tells what a step costs the program and the engine (see threads.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from benchmarks import codecs, one_node, sweeps
from benchmarks.plots import FOLDER
from benchmarks.ranks import on_ranks

CASES = ("codecs", *one_node.CASES, "sizes", "threads")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument(
        "cases",
        nargs="*",
        default=list(CASES),
        metavar="case",
        help=", ".join(CASES),
    )
    parser.add_argument("-np", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a few rounds of everything")
    parser.add_argument("--every-isa", action="store_true", help="codecs with slower ones, too")
    parser.add_argument("--output", type=Path, default=FOLDER / "one_node.json")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if options.as_rank:
        return as_rank(options)
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    """The chosen cases, in the order of the table of them."""
    folder: Path = options.output.parent
    folder.mkdir(parents=True, exist_ok=True)
    quick = ["--quick"] if options.quick else []
    if "codecs" in options.cases:
        codecs.run(options.quick, options.every_isa, folder / "codecs.json")
    if cases := [case for case in options.cases if case in one_node.CASES]:
        rest = ["--as-rank", "-np", str(options.np), "--output", str(options.output)]
        if code := on_ranks(options.np, "benchmarks", *cases, *quick, *rest):
            return code
    if "sizes" in options.cases:
        sweeps.run("sizes", (options.np,), folder, options.quick)
    if "threads" in options.cases:
        output = str(folder / "threads.json")
        return on_ranks(options.np, "benchmarks.threads", "--output", output, *quick)
    return 0


def as_rank(options: argparse.Namespace) -> int:
    import bagua.torch

    results = one_node.run(options.cases, options.quick)
    if bagua.torch.rank() == 0:
        print(table(results))
        about = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "ranks": options.np,
            "python": platform.python_version(),
        }
        options.output.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
        print(f"written: {options.output}")
    return 0


def table(results: dict[str, one_node.Case]) -> str:
    """One line a system and case: median, minimum, bytes touched, and against our own median."""
    head = f"{'case':<11}{'system':<13}{'median':>12}{'minimum':>12}{'touched':>9}{'adds':>12}"
    lines = [head]
    for name, case in results.items():
        for system, figures in case.items():
            if name == "idle":
                lines.append(
                    f"{name:<11}{system:<13}{figures['median_s']:>11.3%} of a core, "
                    f"{figures['messages']:.0f} messages"
                )
            else:
                lines.append(f"{name:<11}{system:<13}{cells(case, system)}")
    lines += [
        "",
        "touched: bytes that a rank's exchanges read or write, anywhere, for each byte of its own",
        "  that is reduced; for a memcpy 2. Of peers it is not known.",
        "alone: without communication. adds: what is more than that; below 0 it is noise.",
    ]
    lines += [f"{name}: {one_node.CASES[name].__doc__.strip()}" for name in results]
    return "\n".join(lines)


def cells(case: one_node.Case, system: str) -> str:
    figures = case[system]
    median, ours = figures["median_s"], case["bagua"]["median_s"]
    touched = f"{figures['touched_per_byte']:.2f}" if "touched_per_byte" in figures else ""
    alone = case["alone"]["median_s"] if "alone" in case and system != "alone" else None
    adds = "" if alone is None else shown(median - alone)
    compared = ""
    if system != "bagua":
        compared = f"{median / ours:.2f} x bagua's"
        if alone is not None and ours > alone:
            compared = f"adds {(median - alone) / (ours - alone):.2f} x bagua's"
    if system.startswith("bagua") and "memcpy" in case:
        apart = ", " if compared else ""
        compared += f"{apart}{median / case['memcpy']['median_s']:.2f} x memcpy"
    times = f"{shown(median):>12}{shown(figures['min_s']):>12}"
    return f"{times}{touched:>9}{adds:>12}  {compared}".rstrip()


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if abs(seconds) < 1e-3 else f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
