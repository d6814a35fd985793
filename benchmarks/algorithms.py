"""The algorithms that are measured: those with a name, and some that are composed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

import bagua.torch
from bagua.algorithms import Algorithm, DiLoCo, LocalSGD, find, names

COMPOSED = {
    "minmax_u4": Algorithm(codec="minmax_u4"),
    "minmax_u4_feedback": Algorithm(codec="minmax_u4", error_feedback=True),
    "sign1": Algorithm(codec="sign1"),
    "local_sgd_forward": LocalSGD(every=16, when="forward"),
    "diloco_short": DiLoCo(every=8, outer_momentum=0.5),
}

Optimizers = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def all_algorithms(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Algorithm]:
    """By name, the exact one first; with these options changed."""
    known = {name: find(name) for name in ("gradient_allreduce", *names())} | COMPOSED
    return {name: replace(known[name], **options.get(name, {})) for name in known}


def add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--algorithms", nargs="+", default=[], metavar="name", help="these alone (default: all)"
    )


def check_choice(parser: argparse.ArgumentParser, chosen: Iterable[str]) -> None:
    known = [*names(), *COMPOSED]
    if unknown := set(chosen) - set(known):
        parser.error(f"no algorithm {', '.join(sorted(unknown))}; known: {', '.join(known)}")


def distributed(model: torch.nn.Module, make: Optimizers, algorithm: Algorithm) -> Any:
    """The model's optimizer; where it is Adam's momentum that travels, QAdam at the same rate."""
    optimizer = make(model.parameters())
    if algorithm.what == "momentum":
        rate, warmup_steps = optimizer.param_groups[0]["lr"], algorithm.warmup_steps
        optimizer = bagua.torch.QAdam(model.parameters(), rate, warmup_steps)
    return bagua.torch.DistributedOptimizer(
        optimizer, model.named_parameters(), algorithm=algorithm
    )
