"""What one machine can show; run by every rank, see __main__.py."""

from __future__ import annotations

import resource
import time
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

import bagua.torch
from benchmarks.measure import Run, interleaved
from benchmarks.models import ManyParameters, mlp, steps
from benchmarks.peers import all_peers, turns, zeros

Case = dict[str, dict[str, float]]


def latency(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """One element, blocking, 200 times in a row."""
    tensor = zeros(1)
    runs = each(peers, "allreduce", tensor, "one")
    rounds = 2 if quick else 20
    return beside(peers, runs, rounds, meet, tensor.nbytes, turn=200, in_a_row=True)


def bandwidth(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """64 MB in one tensor, or in an arena of `empty_shared`; memcpy: all ranks at once."""
    return vector(peers, 16 << 20, 1 if quick else 6, meet)


def megabyte(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """1 MB, else like bandwidth."""
    return vector(peers, 1 << 18, 2 if quick else 40, meet)


def vector(peers: dict[str, Any], count: int, rounds: int, meet: Any) -> Case:
    tensor, other = zeros(count), zeros(count)
    arena = bagua.torch.empty_shared(count).zero_()
    runs = each(peers, "allreduce", tensor, f"ordinary {count}")
    runs["bagua arena"] = partial(peers["bagua"].allreduce, arena, f"arena {count}")
    runs["memcpy"] = partial(other.copy_, tensor)
    return beside(peers, runs, rounds, meet, tensor.nbytes)


def many(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """500 tensors of 4 KB: started one by one, then waited for."""
    return small_tensors(peers, "allreduce_many", 1 if quick else 12, meet)


def grouped(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """500 tensors of 4 KB in one call."""
    return small_tensors(peers, "allreduce_grouped", 1 if quick else 12, meet)


def small_tensors(peers: dict[str, Any], operation: str, rounds: int, meet: Any) -> Case:
    tensors = [zeros(1024) for _ in range(500)]
    runs = each(peers, operation, tensors)
    return beside(peers, runs, rounds, meet, 500 * tensors[0].nbytes)


def each(peers: dict[str, Any], operation: str, *arguments: Any) -> dict[str, Run]:
    """The operation of each system that has it."""
    return {
        name: partial(getattr(peer, operation), *arguments)
        for name, peer in peers.items()
        if hasattr(peer, operation)
    }


def beside(
    peers: dict[str, Any], runs: dict[str, Run], rounds: int, meet: Any, nbytes: int, **how: Any
) -> Case:
    """Times of all, and what our own touch of memory, by one more run of each."""
    figures = interleaved(runs, rounds, meet, turns=turns(peers), **how)
    for name, run in runs.items():
        if name.startswith("bagua"):
            before = bagua.torch.counters()["touched_nbytes"]
            run()
            touched = bagua.torch.counters()["touched_nbytes"] - before
            figures[name]["touched_per_byte"] = touched / nbytes
    if "memcpy" in figures:
        figures["memcpy"]["touched_per_byte"] = 2.0  # each is read and written
    return figures


def gradients(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """A step whose model has 500 gradients of 4 KB."""
    return trained(peers, ManyParameters, torch.ones(1), 1 if quick else 12, meet)


def training(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """A step of the MLP 784-2048-2048-2048-10 (40 MB), batch 64 per rank."""
    return trained(peers, mlp, torch.randn(64, 784), 1 if quick else 6, meet)


def trained(
    peers: dict[str, Any], model_of: Any, inputs: torch.Tensor, rounds: int, meet: Any
) -> Case:
    runs = steps(peers, model_of, inputs)
    nbytes = sum(param.nbytes for param in model_of().parameters())
    return beside(peers, runs, rounds, meet, nbytes)


def idle(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """CPU time of an initialized process that does nothing, per second."""
    meet()
    seconds = 1.0 if quick else 5.0
    before = resource.getrusage(resource.RUSAGE_SELF)
    counters = bagua.torch.counters()
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    messages = bagua.torch.counters()["control_messages"] - counters["control_messages"]
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    share = used / seconds
    return {"bagua": {"median_s": share, "min_s": share, "rounds": 1, "messages": messages}}


CASES = {
    case.__name__: case
    for case in (latency, many, grouped, gradients, megabyte, bandwidth, training, idle)
}


def run(names: list[str], quick: bool) -> dict[str, Case]:
    """The cases' figures, on every rank; those of the slowest rank count."""
    torch.set_num_threads(1)
    bagua.torch.init()
    comm = MPI.COMM_WORLD
    peers: dict[str, Any] = {}
    results = {}
    # Idleness first: a peer's threads in this process are not ours to answer for.
    for name in sorted(names, key=lambda name: name != "idle"):
        if name != "idle":
            peers = peers or all_peers(comm)
        mine = CASES[name](peers, comm.Barrier, quick)
        everyone = comm.allgather(mine)
        results[name] = {
            system: max((figures[system] for figures in everyone), key=lambda f: f["median_s"])
            for system in mine
        }
    return results
