"""`python -m benchmarks`: starts the ranks, prints the table, writes the JSON file.

python -m benchmarks                     every case, 2 ranks
python -m benchmarks latency training    these cases
python -m benchmarks --quick             a few rounds, to see that it runs
python -m benchmarks codecs --every-isa  with every instruction set that the processor has

The codecs are measured in this process, everything else by ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from benchmarks import codecs, one_node
from benchmarks.ranks import on_ranks

CASES = ("codecs", *one_node.CASES)


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
    parser.add_argument("--output", type=Path, default=Path("build/bench/one_node.json"))
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if options.as_rank:
        return as_rank(options)
    if "codecs" in options.cases:
        options.cases.remove("codecs")
        codecs.run(options.quick, options.every_isa, options.output.with_name("codecs.json"))
    return launch(options) if options.cases else 0


def launch(options: argparse.Namespace) -> int:
    """Runs this module again, on every rank."""
    quick = ["--quick"] if options.quick else []
    rest = ["--as-rank", "-np", str(options.np), "--output", str(options.output)]
    return on_ranks(options.np, "benchmarks", *options.cases, *quick, *rest)


def as_rank(options: argparse.Namespace) -> int:
    import bagua.torch

    results = one_node.run(options.cases, options.quick)
    if bagua.torch.rank() == 0:
        print(table(results))
        options.output.parent.mkdir(parents=True, exist_ok=True)
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
    """One line a system and case: median, minimum, and against our own median."""
    lines = [f"{'case':<11}{'system':<9}{'median':>12}{'minimum':>12}{'adds':>12}  {'':>10}"]
    for name, case in results.items():
        alone = case.get("alone", {}).get("median_s")
        ours = case["bagua"]["median_s"]
        for system, figures in case.items():
            median = figures["median_s"]
            adds = added = ""
            if name == "idle":
                lines.append(
                    f"{name:<11}{system:<9}{median:>11.3%} of a core, "
                    f"{figures['messages']:.0f} messages"
                )
                continue
            if alone is not None and system != "alone":
                adds = shown(median - alone)
            if system != "bagua":
                added = f"{median / ours:.2f} x bagua's"
                if alone is not None and system != "alone" and ours > alone:
                    added = f"adds {(median - alone) / (ours - alone):.2f} x bagua's"
            lines.append(
                f"{name:<11}{system:<9}{shown(median):>12}{shown(figures['min_s']):>12}"
                f"{adds:>12}  {added}"
            )
    lines += [
        "",
        "alone: without communication. adds: what is more than that; below 0 it is noise.",
    ]
    lines += [f"{name}: {one_node.CASES[name].__doc__.strip()}" for name in results]
    return "\n".join(lines)


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if abs(seconds) < 1e-3 else f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
