"""What one machine can show; run by every rank, see __main__.py."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from mpi4py import MPI

import bagua.torch
from benchmarks.measure import interleaved
from benchmarks.models import ManyParameters, mlp, steps
from benchmarks.peers import all_peers, zeros

Case = dict[str, dict[str, float]]


def latency(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """One element, blocking, 200 times in a row."""
    tensor = zeros(1)
    runs = {
        name: lambda peer=peer: peer.allreduce(tensor, "one")
        for name, peer in peers.items()
        if hasattr(peer, "allreduce")
    }
    return interleaved(runs, 2 if quick else 20, meet, turn=200, in_a_row=True)


def bandwidth(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """64 MB of fp32 in one tensor; memcpy is both ranks copying 64 MB at once.

    Bagua also on memory from `empty_shared`, as gradients are.
    """
    tensor, other = zeros(16 << 20), zeros(16 << 20)
    arena = bagua.torch.empty_shared(16 << 20).zero_()
    runs = {
        name: lambda peer=peer: peer.allreduce(tensor, "large")
        for name, peer in peers.items()
        if hasattr(peer, "allreduce")
    }
    runs["bagua arena"] = lambda: peers["bagua"].allreduce(arena, "large arena")
    runs["memcpy"] = lambda: other.copy_(tensor)
    return interleaved(runs, 1 if quick else 6, meet)


def many(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """500 tensors of 4 KB: started one by one, then waited for."""
    tensors = [zeros(1024) for _ in range(500)]
    runs = {
        name: lambda peer=peer: peer.allreduce_many(tensors)
        for name, peer in peers.items()
        if hasattr(peer, "allreduce_many")
    }
    return interleaved(runs, 1 if quick else 12, meet)


def grouped(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """500 tensors of 4 KB in one call."""
    tensors = [zeros(1024) for _ in range(500)]
    runs = {
        name: lambda peer=peer: peer.allreduce_grouped(tensors)
        for name, peer in peers.items()
        if hasattr(peer, "allreduce_grouped")
    }
    return interleaved(runs, 1 if quick else 12, meet)


def gradients(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """A step whose model has 500 gradients of 4 KB."""
    return interleaved(steps(peers, ManyParameters, torch.ones(1)), 1 if quick else 12, meet)


def training(peers: dict[str, Any], meet: Any, quick: bool) -> Case:
    """A step of the MLP 784-2048-2048-2048-10 (40 MB), batch 64 per rank."""
    return interleaved(steps(peers, mlp, torch.randn(64, 784)), 1 if quick else 6, meet)


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
    case.__name__: case for case in (latency, many, grouped, gradients, bandwidth, training, idle)
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
