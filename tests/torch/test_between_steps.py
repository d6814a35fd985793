"""Algorithms that exchange weights or their changes, against one loop that simulates all ranks."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from common.simulation import Simulation, coding_of, travel
from torch import nn

from bagua.algorithms import (
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
)
from bagua.common.core import core
from bagua.common.world import world
from bagua.torch import mixing, outer

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = [(3, 700), (5,), (40, 41)]
INNER = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def noise(rank: int, step: int, shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


@pytest.mark.parametrize("by", ["broadcast_parameters", "allreduce_", "grouped_allreduce_"])
def test_an_average_under_way_undoes_no_other_exchange(everyone, hvd, by):
    param = nn.Parameter(torch.full((3000,), float(everyone.me)))
    sgd = torch.optim.SGD([param], lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, [("w", param)], algorithm="decentralized")
    for _ in range(2):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    with torch.no_grad():
        param.fill_(5.0 + everyone.me)  # before it goes to everyone
        if by == "broadcast_parameters":
            hvd.broadcast_parameters([("w", param)], root_rank=0)
        elif by == "allreduce_":
            hvd.allreduce_(param, op=hvd.Min)
        else:
            hvd.grouped_allreduce_([param], op=hvd.Min)
    version = param._version
    hvd.allreduce_(param.detach(), op=hvd.Min)
    assert param._version > version
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        param.grad = torch.zeros_like(param)
        optimizer.step()
    optimizer.settle()
    assert (param == 5).all()


class Replica:
    """One rank of a model that is pulled somewhere else on every rank and in every step."""

    def __init__(self, rank: int, inner: str) -> None:
        self.rank = rank
        self.params = [nn.Parameter(noise(99, 0, shape)) for shape in SHAPES]
        self.optimizer = INNER[inner](self.params)

    def backward(self, step: int) -> None:
        for param in self.params:
            param.grad = None
        loss = sum(
            (param - noise(self.rank, step, param.shape)).square().sum() for param in self.params
        )
        (loss / 4).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()


def values(replicas) -> list[list[torch.Tensor]]:
    return [[param.detach().clone() for param in replica.params] for replica in replicas]


def mean(tensors) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


@torch.no_grad()
def put(replica: Replica, tensors) -> None:
    for param, tensor in zip(replica.params, tensors):
        param.copy_(tensor)


def real(everyone, hvd, inner: str, algorithm, steps: int, after=lambda step, optimizer: None):
    """What this rank has after so many steps, and its optimizer."""
    replica = Replica(everyone.me, inner)
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=algorithm)
    for step in range(steps):
        replica.backward(step)
        optimizer.step()
        after(step, optimizer)
    return replica, optimizer


def drawn(seed: int, number: int) -> int:
    """splitmix64's so-manyth number."""
    state = np.array([seed], np.uint64) + np.uint64(number + 1) * np.array(
        [0x9E3779B97F4A7C15], np.uint64
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return int(state[0])


def shuffled(n: int, seed: int) -> list[int]:
    order = list(range(n))
    for left in range(n, 1, -1):
        other = drawn(seed, left) % left
        order[left - 1], order[other] = order[other], order[left - 1]
    return order


def takes_from(peers: str, number: int, n: int, me: int) -> list[int]:
    """Whose values this rank averages in exchange `number`, in rank order."""
    if peers == "all":
        return list(range(n))
    if peers == "ring":
        return sorted({(me - 1) % n, me, (me + 1) % n})
    if peers == "exponential":
        return sorted({me, (me - 2 ** (number % max(1, math.ceil(math.log2(n))))) % n})
    if peers == "random":
        order = shuffled(n, drawn(SEED, number))
        for pair in zip(order[::2], order[1::2]):
            if me in pair:
                return sorted(pair)
        return [me]
    # A tournament by the circle method: of an even number the last one sits in the middle, and
    # meets who would meet itself.
    seats = n if n % 2 else n - 1
    for other in set(range(n)) - {me}:
        low, high = sorted([me, other])
        met = 2 * low if high == seats else low + high
        if met % seats == number % seats:
            return [low, high]
    return [me]


SEED = 3
PEERS = ["all", "shift_one", "random", "ring", "exponential"]
MIXED = [(peers, 1, when, "sgd") for peers in PEERS for when in ("forward", "step")]
MIXED += [("shift_one", 3, when, inner) for when in ("forward", "step") for inner in INNER]


@pytest.mark.parametrize(("peers", "every", "when", "inner"), MIXED)
def test_decentralized(everyone, hvd, peers, every, when, inner):
    seed = SEED if peers == "random" else 0
    algorithm = Decentralized(peers=peers, seed=seed, every=every, when=when, hierarchical=False)
    n, steps, number = everyone.size, 8, 0
    replicas = [Replica(rank, inner) for rank in range(n)]

    def mix() -> None:
        nonlocal number
        before = values(replicas)
        for me, replica in enumerate(replicas):
            chosen = [before[rank] for rank in takes_from(peers, number, n, me)]
            put(replica, [mean(tensors) for tensors in zip(*chosen)])
        number += 1

    for step in range(steps):
        for replica in replicas:
            replica.backward(step)
        if when == "forward" and step and step % every == 0:
            mix()
        for replica in replicas:
            replica.optimizer.step()
        if when == "step" and (step + 1) % every == 0:
            mix()
    mine, optimizer = real(everyone, hvd, inner, algorithm, steps)
    for param, expected in zip(mine.params, replicas[everyone.me].params):
        torch.testing.assert_close(param, expected, rtol=1e-6, atol=1e-6)
        if n < 3 or peers in ("shift_one", "random"):
            assert torch.equal(param, expected)
    optimizer.settle()
    equal = hvd.allgather_object([param.detach() for param in mine.params])
    assert all(torch.equal(a, b) for theirs in equal for a, b in zip(theirs, equal[0]))
    assert optimizer.consensus_distance() < 1e-12


def test_on_one_machine_hierarchical_means_all(everyone, hvd):
    mine, optimizer = real(everyone, hvd, "sgd", Decentralized(when="step"), 3)
    assert optimizer.consensus_distance() < 1e-6
    assert mine.params[0].isfinite().all()


@pytest.mark.parametrize(
    ("codec", "inner"),
    [
        *((codec, "sgd") for codec in ("minmax_u8", "minmax_u4", "fp8_e4m3", "bf16")),
        ("minmax_u8", "momentum"),
        ("minmax_u8", "adam"),
    ],
)
def test_low_precision_decentralized(everyone, hvd, codec, inner):
    algorithm = LowPrecisionDecentralized(codec=codec, hierarchical=False)
    n, steps = everyone.size, 5
    coding = coding_of(algorithm.plan(None, None, 0))
    replicas = [Replica(rank, inner) for rank in range(n)]
    flats = [torch.cat([p.detach().flatten() for p in replica.params]) for replica in replicas]
    own, left, right = ([flat.clone() for flat in flats] for _ in range(3))
    for step in range(steps):
        for replica in replicas:
            replica.step(step)
        if n == 1:
            continue
        moved = []
        for rank, replica in enumerate(replicas):
            x = torch.cat([param.detach().flatten() for param in replica.params])
            third = torch.tensor(1.0) / torch.tensor(3.0)
            z = x + third * left[rank] + third * right[rank]
            z -= torch.tensor(5.0) / torch.tensor(3.0) * own[rank]
            moved.append(torch.from_numpy(travel(coding, z.numpy())))
        for rank, replica in enumerate(replicas):
            own[rank] += moved[rank]
            left[rank] += moved[(rank - 1) % n]
            right[rank] += moved[(rank + 1) % n]
            parts = own[rank].split([param.numel() for param in replica.params])
            put(replica, [part.view_as(p) for part, p in zip(parts, replica.params)])
    mine, optimizer = real(everyone, hvd, inner, algorithm, steps)
    for param, expected in zip(mine.params, replicas[everyone.me].params):
        assert torch.equal(param, expected)
    kept = optimizer.state_dict()["bagua"]["kept"]["values"]
    everyones = hvd.allgather_object(kept)
    for name, copies in kept["kept.1"].items():
        assert torch.equal(copies, everyones[(everyone.me - 1) % n]["kept.0"][name])
    for name, copies in kept["kept.2"].items():
        assert torch.equal(copies, everyones[(everyone.me + 1) % n]["kept.0"][name])


def test_large_weights_move_as_their_copies_do(everyone, hvd):
    """They are exchanged where they are, unless ranks of a machine have to see them."""
    n, me, steps, lr = everyone.size, everyone.me, 4, 0.1
    algorithm = LowPrecisionDecentralized(hierarchical=False)
    coding = coding_of(algorithm.plan(None, None, 0))
    shapes = [(512,), (512, 300), (400, 512)]  # whole blocks, whoever comes first
    begin = [noise(99, 0, shape) for shape in shapes]
    params = [nn.Parameter(tensor.clone()) for tensor in begin[:2]]
    params.append(nn.Parameter(begin[2].t().clone(memory_format=torch.preserve_format)))
    assert not params[2].is_contiguous()
    places = [param.data_ptr() for param in params]

    own = [torch.cat([tensor.flatten() for tensor in begin]) for _ in range(n)]
    x, left, right = ([flat.clone() for flat in own] for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=lr), algorithm=algorithm)
    in_arena = large_in_arena(optimizer)
    for view in in_arena:
        view.fill_(-1)  # what never goes there leaves it so
    for step in range(steps):
        everyones = [[noise(rank, step, shape) for shape in shapes] for rank in range(n)]
        for param, grad in zip(params, everyones[me]):
            param.grad = grad if grad.shape == param.shape else grad.t()
        optimizer.step()
        for rank in range(n):
            x[rank].add_(torch.cat([grad.flatten() for grad in everyones[rank]]), alpha=-lr)
        if n == 1:
            continue
        third = torch.tensor(1.0) / torch.tensor(3.0)
        z = [x[r] + third * left[r] + third * right[r] for r in range(n)]
        z = [z[r] - torch.tensor(5.0) / torch.tensor(3.0) * own[r] for r in range(n)]
        moved = [torch.from_numpy(travel(coding, flat.numpy())) for flat in z]
        for rank in range(n):
            own[rank] += moved[rank]
            left[rank] += moved[(rank - 1) % n]
            right[rank] += moved[(rank + 1) % n]
            x[rank] = own[rank].clone()
    flat = torch.cat([params[0].data, params[1].data.flatten(), params[2].data.t().flatten()])
    assert torch.equal(flat, x[me])
    assert places == [param.data_ptr() for param in params]
    if not os.environ.get("PRETEND_GPU"):
        assert len(in_arena) == (0 if everyone.shows_memory else 2)
        assert all((view == -1).all() for view in in_arena)


def large_in_arena(optimizer) -> list[torch.Tensor]:
    """Where large weights would be, were they copied."""
    pieces = optimizer._driver._pieces
    views = [(view, large) for piece in pieces for view, large in zip(piece.views, piece._large)]
    return [view for view, large in views if large]


@pytest.mark.ranks(3, 4)
def test_loaded_often_goes_on_the_same_way(everyone, hvd):
    """Whose turn it is comes from the rounds of the checkpoint alone."""
    param = nn.Parameter(torch.zeros(5))
    sgd = torch.optim.SGD([param], lr=0.1)
    algorithm = Decentralized(peers="random", hierarchical=False)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=algorithm)

    def steps(count: int) -> torch.Tensor:
        for step in range(count):
            param.grad = noise(everyone.me, step, (5,))
            optimizer.step()
        return param.detach().clone()

    begin, state = steps(2), copy.deepcopy(optimizer.state_dict())
    ends = []
    for _ in range(12):
        param.data.copy_(begin)
        optimizer.load_state_dict(copy.deepcopy(state))
        ends.append(steps(3))
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_who_is_interrupted_keeps_weights_that_nobody_writes(everyone, hvd):
    """Its peers come when it has given up, and large weights are exchanged where they are."""
    param = nn.Parameter(noise(everyone.me, 0, (512, 300)))
    sgd = torch.optim.SGD([param], lr=0.1)
    algorithm = LowPrecisionDecentralized(hierarchical=False)
    optimizer = hvd.DistributedOptimizer(sgd, [("w", param)], algorithm=algorithm)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    hvd.barrier()
    if everyone.size == 1:
        return
    if everyone.me == 0:

        def give_up(*_) -> None:
            raise TimeoutError("given up")

        before = signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeoutError):
            optimizer.step()
        signal.signal(signal.SIGALRM, before)
        kept = param.detach().clone()
        hvd.barrier()
        hvd.allreduce(torch.zeros(1))  # comes after what was under way
        assert torch.equal(param, kept)
    else:
        hvd.barrier()
        with pytest.raises(hvd.PeerError, match="rank 0 was interrupted"):
            optimizer.step()
        hvd.allreduce(torch.zeros(1))
    mine = "was interrupted" if everyone.me == 0 else "gave up"
    with pytest.raises(hvd.BaguaError, match=f"this rank {mine} in the middle"):
        optimizer.step()


def test_autograd_knows_of_large_weights_that_moved_when_the_step_ends(everyone, hvd):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = LowPrecisionDecentralized(hierarchical=False)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    inputs = torch.randn(2, 512, requires_grad=True)
    for _ in range(3):
        loss = model(inputs).square().mean()
        hvd.allreduce(loss.detach())  # what is told here is of this step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    version = model[1].weight._version
    optimizer.step()  # without gradients: what moves is what the ranks make of it
    if everyone.size > 1:
        assert model[1].weight._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("changes", [True, False])
def test_who_changed_weights_that_travel(everyone, hvd, changes, monkeypatch):
    """That large ones are lent, and torch is told that they were written, is no change."""
    param = nn.Parameter(torch.ones(600, 600))
    start = mixing.Mixing._start

    def then(self, urgency):
        start(self, urgency)
        core.tell_written()  # as any wait of another thread does
        if changes:
            with torch.no_grad():
                param.add_(1)

    monkeypatch.setattr(mixing.Mixing, "_start", then)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.1),
        [("w", param)],
        algorithm=LowPrecisionDecentralized(hierarchical=False),
    )
    param.grad = torch.zeros_like(param)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.step()
    assert any("while their average travelled" in str(w.message) for w in seen) == changes


@pytest.mark.parametrize("inner", list(INNER))
@pytest.mark.parametrize(
    "algorithm",
    [LocalSGD(every=2), DiLoCo(every=3), DiLoCo(every=2, when="forward"), LocalSGD(every=1)],
    ids=repr,
)
@pytest.mark.parametrize("piece_nbytes", [8 << 20, 4000])
def test_rounds(everyone, hvd, algorithm, inner, piece_nbytes, monkeypatch):
    monkeypatch.setattr(outer, "_PIECE_NBYTES", piece_nbytes)
    replicas = [Replica(rank, inner) for rank in range(everyone.size)]
    common = values(replicas)[0]
    begins = values(replicas)
    momentum = [torch.zeros_like(tensor) for tensor in common]
    lr, beta = algorithm.outer_lr, algorithm.outer_momentum
    flying = None

    def step_together(changes) -> None:
        for i, tensor in enumerate(common):
            change = mean([theirs[i] for theirs in changes])
            momentum[i] = beta * momentum[i] + change
            tensor -= lr * (change + beta * momentum[i])

    for step in range(7):
        for replica in replicas:
            replica.step(step)
        if (step + 1) % algorithm.every:
            continue
        now = values(replicas)
        changes = [[b - x for b, x in zip(*pair)] for pair in zip(begins, now)]
        if algorithm.when == "step":
            step_together(changes)
            for replica in replicas:
                put(replica, common)
        elif flying is not None:
            step_together(flying)
            for replica, mine in zip(replicas, changes):
                put(replica, [tensor - change for tensor, change in zip(common, mine)])
        flying, begins = changes, values(replicas)
    mine, optimizer = real(everyone, hvd, inner, algorithm, 7)
    for param, expected in zip(mine.params, replicas[everyone.me].params):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-5)
    optimizer.settle()
    assert optimizer.consensus_distance() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("when", ["step", "forward"])
def test_what_weights_of_16_bits_cannot_hold_is_learned_all_the_same(everyone, hvd, when, dtype):
    """By the least that they can hold one rank learns in each round; a part of it is common."""
    param = nn.Parameter(torch.ones(40, dtype=dtype))
    algorithm = DiLoCo(every=1, when=when, outer_lr=0.7, outer_momentum=0.0)
    sgd = torch.optim.SGD([param], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, [("w", param)], algorithm=algorithm)
    least = torch.finfo(dtype).eps
    for _ in range(40):
        param.grad = torch.full_like(param, 0.0 if everyone.me else -least)
        optimizer.step()
    optimizer.settle()
    learned = torch.tensor(1 + 0.7 * 40 * least / everyone.size).to(dtype)
    torch.testing.assert_close(param.detach(), learned.expand(40), rtol=0, atol=2 * least)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_learned_while_an_average_travels_is_kept(everyone, hvd, dtype):
    param = nn.Parameter(torch.zeros(300, 5, dtype=dtype))
    sgd = torch.optim.SGD([param], lr=1.0)
    algorithm = AsyncModelAverage(sync_interval_ms=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, [("w", param)], algorithm=algorithm)

    def step(learned: float) -> None:
        param.grad = torch.full_like(param, -learned)
        optimizer.step()

    step(0.0)
    optimizer.settle()
    step(0.0 if everyone.me else 4.0 * everyone.size)  # this begins to travel
    with torch.no_grad():
        param += 10 * (everyone.me + 1)  # and this is learned meanwhile
    before = param.detach().clone()
    while everyone.size > 1 and torch.equal(param, before):
        time.sleep(0.001)
        step(0.0)
    assert (param == 4 + 10 * (everyone.me + 1)).all()


def test_changes_of_norms_and_biases_travel_exactly(everyone, hvd):
    torch.manual_seed(0)
    model = nn.Linear(300, 50)
    before = [p.detach().clone() for p in model.parameters()]
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    algorithm = Algorithm(what="delta", codec="minmax_u4")
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    for param in model.parameters():
        param.grad = noise(everyone.me, 0, param.shape).round(decimals=1)
    optimizer.step()
    for param, was in zip(model.parameters(), before):
        grads = [noise(rank, 0, param.shape).round(decimals=1) for rank in range(everyone.size)]
        near = torch.isclose(was - param, torch.stack(grads).mean(0), rtol=0, atol=1e-5)
        assert bool(near.all()) == (param is model.bias or everyone.size == 1)


@pytest.mark.parametrize("codec", ["fp16", "minmax_u8", "sign1", "topk"])
def test_changes_of_float64_travel_exactly(everyone, hvd, codec):
    param = nn.Parameter(torch.zeros(30, 50).double())
    sgd = torch.optim.SGD([param], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=Algorithm(what="delta", codec=codec))
    grads = everyone.draw((30, 50), torch.float64)
    for _ in range(2):
        param.grad = grads[everyone.me].clone()
        optimizer.step()
    torch.testing.assert_close(param, -2 * mean(grads), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("inner", ["momentum", "adam"])
@pytest.mark.parametrize("when", ["step", "forward"])
@pytest.mark.parametrize("codec", ["minmax_u8", "sign1", "topk"])
def test_rounds_through_a_codec(everyone, hvd, codec, when, inner):
    """What is lost of the changes of a round is added to those of the next."""
    density = {"density": 0.1} if codec == "topk" else {}
    algorithm = DiLoCo(every=2, when=when, codec=codec, error_feedback=True, **density)
    n, lr, beta = everyone.size, algorithm.outer_lr, algorithm.outer_momentum
    replicas = [Replica(rank, inner) for rank in range(n)]
    coded = [i for i, shape in enumerate(SHAPES) if len(shape) > 1]
    begins = [torch.cat([replicas[0].params[i].detach().flatten() for i in coded])] * n
    common, momentum, flying = begins[0].clone(), torch.zeros_like(begins[0]), None
    simulation = Simulation(algorithm.plan(None, None, 0), n, len(common))

    def step_together(changes) -> None:
        change = torch.from_numpy(simulation.mean(np.stack(changes)))
        common.sub_(change, alpha=lr)
        momentum.mul_(beta).add_(change)
        common.sub_(momentum, alpha=lr * beta)

    for step in range(8):
        for replica in replicas:
            replica.step(step)
        if step % 2 == 0:
            continue
        now = [torch.cat([r.params[i].detach().flatten() for i in coded]) for r in replicas]
        changes = [(begin - x).numpy() for begin, x in zip(begins, now)]
        if when == "step":
            step_together(changes)
            now = [common.clone()] * n
        elif flying is not None:
            step_together(flying)
            now = [common - torch.from_numpy(change) for change in changes]
        flying, begins = changes, now
        for replica, values in zip(replicas, now):
            parts = values.split([replica.params[i].numel() for i in coded])
            for i, part in zip(coded, parts):
                with torch.no_grad():
                    replica.params[i].copy_(part.view(SHAPES[i]))
    mine, optimizer = real(everyone, hvd, inner, algorithm, 8)
    assert when == "forward" or optimizer.consensus_distance() == 0
    for i in coded:
        assert torch.equal(mine.params[i], replicas[everyone.me].params[i])


def test_in_the_background(everyone, hvd):
    algorithm = AsyncModelAverage(sync_interval_ms=0.0)
    replica = Replica(everyone.me, "sgd")
    replica.optimizer.param_groups[0]["lr"] = 0.0
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=algorithm)
    replica.step(0)
    optimizer.step()
    with torch.no_grad():
        for param in replica.params:
            param += everyone.me
    before = optimizer.consensus_distance()
    for step in range(200):
        replica.backward(step)
        optimizer.step()
    optimizer.settle()
    assert optimizer.consensus_distance() < 1e-12
    assert everyone.size == 1 or before > 0.01
    for param, shape in zip(replica.params, SHAPES):
        expected = noise(99, 0, shape) + (everyone.size - 1) / 2
        torch.testing.assert_close(param.detach(), expected, rtol=1e-4, atol=1e-4)


def test_in_the_background_averages_are_apart(everyone, hvd):
    replica = Replica(everyone.me, "sgd")
    replica.optimizer.param_groups[0]["lr"] = 0.0
    algorithm = AsyncModelAverage(sync_interval_ms=1e9)
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=algorithm)
    for step in range(100):
        if step == 50:  # the first average is over, or began before
            with torch.no_grad():
                for param in replica.params:
                    param += everyone.me
        replica.backward(step)
        optimizer.step()
    assert everyone.size == 1 or optimizer.consensus_distance() > 0.01
    optimizer.settle()
    assert optimizer.consensus_distance() < 1e-12


def test_in_the_background_ranks_may_rest_and_be_slow(everyone, hvd):
    replica = Replica(everyone.me, "sgd")
    optimizer = hvd.DistributedOptimizer(
        replica.optimizer, algorithm=AsyncModelAverage(sync_interval_ms=0.0, warmup_steps=2)
    )
    for step in range(5 + 7 * everyone.me):
        replica.backward(step)
        optimizer.step()
        if step == 3:
            optimizer.pause()
        if step == 4 and everyone.me:
            optimizer.resume()
    optimizer.settle()
    assert optimizer.consensus_distance() < 1e-12
    optimizer.set_algorithm("gradient_allreduce")
    with pytest.raises(hvd.UsageError, match="background"):
        optimizer.pause()


def test_what_was_under_way_is_not_of_what_is_loaded(everyone, hvd):
    """An average of weights that are given up does not change those that take their place."""
    replica = Replica(everyone.me, "sgd")
    optimizer = hvd.DistributedOptimizer(
        replica.optimizer, algorithm=AsyncModelAverage(sync_interval_ms=0.0)
    )
    for round in range(5):
        state = optimizer.state_dict()
        for step in range(4):
            replica.backward(step)
            optimizer.step()
        optimizer.load_state_dict(state)
        optimizer.pause()
        with torch.no_grad():
            for param in replica.params:
                param.fill_(round)
                param.grad = None
        optimizer.step()
        assert all((param == round).all() for param in replica.params)
        optimizer.resume()
    optimizer.settle()


@pytest.mark.parametrize("when", ["forward", "step", "background"])
def test_a_rank_with_fewer_batches_joins(everyone, hvd, when):
    """Others go on among themselves, and what has joined does not pull them anywhere."""
    algorithm = Algorithm(what="weight", when=when, peers="shift_one")
    replica = Replica(everyone.me, "sgd")
    replica.optimizer.param_groups[0]["lr"] = 0.0
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=algorithm)
    for step in range(2 if everyone.me == 0 else 9):
        replica.backward(step)
        optimizer.step()
    if everyone.me > 0:
        assert optimizer.consensus_distance() < 1e-6
    for param, shape in zip(replica.params, SHAPES):
        assert torch.equal(param.detach(), noise(99, 0, shape))
    if everyone.me > 0 and when != "background":  # which all ranks have to end
        optimizer.settle()
    hvd.join()
    for param, shape in zip(replica.params, SHAPES):
        torch.testing.assert_close(param.detach(), noise(99, 0, shape), rtol=1e-6, atol=0)
    optimizer.settle()
    assert optimizer.consensus_distance() < 1e-6


RESUMABLE = [
    "gradient_allreduce",
    Decentralized(hierarchical=False),
    Decentralized(when="step", peers="exponential", every=2, hierarchical=False),
    LowPrecisionDecentralized(hierarchical=False),
    LocalSGD(every=2),
    DiLoCo(every=3, codec="minmax_u4", error_feedback=True),
    DiLoCo(every=2, when="forward"),
    DiLoCo(every=2, warmup_steps=3),
]


@pytest.mark.parametrize("algorithm", RESUMABLE, ids=repr)
@pytest.mark.parametrize("resume_at", [0, 3, 4])
def test_resumes_in_the_same_bits(everyone, hvd, algorithm, resume_at):
    whole, _ = real(everyone, hvd, "momentum", algorithm, 9)
    first, saved = real(everyone, hvd, "momentum", algorithm, resume_at)
    state = copy.deepcopy((values([first])[0], saved.state_dict()))
    replica = Replica(everyone.me, "momentum")
    put(replica, state[0])
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=algorithm)
    optimizer.load_state_dict(state[1])
    for step in range(resume_at, 9):
        optimizer.zero_grad()
        replica.backward(step)
        optimizer.step()
    for param, expected in zip(replica.params, whole.params):
        assert torch.equal(param, expected)


@pytest.mark.parametrize("algorithm", RESUMABLE[1:], ids=repr)
def test_a_checkpoint_of_one_rank_begins_anew(everyone, hvd, algorithm, recwarn):
    first, saved = real(everyone, hvd, "momentum", algorithm, 4)
    state = hvd.broadcast_object((values([first])[0], saved.state_dict()), 0)
    replica = Replica(everyone.me, "momentum")
    put(replica, state[0])
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=algorithm)
    optimizer.load_state_dict(copy.deepcopy(state[1]))
    for step in range(4, 7):
        optimizer.zero_grad()
        replica.backward(step)
        optimizer.step()
    optimizer.settle()
    assert optimizer.consensus_distance() < 1e-12
    warned = any("begins anew" in str(w.message) for w in recwarn)
    assert warned == (everyone.size > 1)


def assert_equal_everywhere(hvd, params) -> None:
    mine = [param.detach() for param in params]
    for theirs in hvd.allgather_object(mine):
        assert all(torch.equal(a, b) for a, b in zip(theirs, mine))


@pytest.mark.parametrize("inner", list(INNER))
def test_from_one_to_another(everyone, hvd, inner):
    """Where gradients travel replicas are equal in every bit, and stay so."""
    replica = Replica(everyone.me, inner)
    optimizer = hvd.DistributedOptimizer(replica.optimizer)
    for number, algorithm in enumerate(
        [
            Decentralized(hierarchical=False),
            "bytegrad",
            LowPrecisionDecentralized(hierarchical=False),
            "topk",
            LocalSGD(every=2),
            "gradient_allreduce",
            LocalSGD(every=2, when="forward"),
            DiLoCo(every=2),
            "powersgd",
            AsyncModelAverage(sync_interval_ms=0.0),
            "gradient_allreduce",
        ]
    ):
        for step in range(3):
            optimizer.zero_grad()
            replica.backward(10 * number + step)
            optimizer.step()
            if optimizer.algorithm.what == "grad":
                assert_equal_everywhere(hvd, replica.params)
        optimizer.set_algorithm(algorithm)
        assert optimizer.consensus_distance() < 1e-12
    for step in range(3):
        optimizer.zero_grad()
        replica.backward(step)
        optimizer.step()
    assert_equal_everywhere(hvd, replica.params)


class WeightsFirst(Algorithm):
    """Gradients travel from the fourth step on."""

    def at(self, step: int) -> Algorithm:
        return Decentralized(hierarchical=False) if step < 3 else Algorithm()


@pytest.mark.parametrize("inner", list(INNER))
@pytest.mark.parametrize("resume_at", [-1, 2, 4])
def test_a_warm_up_by_weights(everyone, hvd, inner, resume_at):
    """Where it ends ranks go on with equal moments, also in a run that has resumed."""
    replica = Replica(everyone.me, inner)
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=WeightsFirst())
    for step in range(6):
        if step == resume_at:
            state = copy.deepcopy((values([replica])[0], optimizer.state_dict()))
            replica = Replica(everyone.me, inner)
            put(replica, state[0])
            optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=WeightsFirst())
            optimizer.load_state_dict(state[1])
        optimizer.zero_grad()
        replica.backward(step)
        optimizer.step()
    assert optimizer.algorithm.at(step) == optimizer._driver.algorithm
    assert_equal_everywhere(hvd, replica.params)


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_checkpoint_after_a_parameter_was_frozen(everyone, hvd, recwarn, zeroes):
    """Before the optimizer has noticed so it is of another model, and the warning says of which."""
    saved, resumed = Replica(everyone.me, "sgd"), Replica(everyone.me, "sgd")
    optimizer = hvd.DistributedOptimizer(saved.optimizer, algorithm=LocalSGD(every=4))
    go_on_together(hvd, saved, optimizer, 2)
    saved.params[0].requires_grad_(False)
    if zeroes:
        optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    resumed.params[0].requires_grad_(False)
    again = hvd.DistributedOptimizer(resumed.optimizer, algorithm=LocalSGD(every=4))
    again.load_state_dict(state)
    go_on_together(hvd, resumed, again, 1)
    warned = [str(w.message) for w in recwarn if "begins anew" in str(w.message)]
    assert len(warned) == (not zeroes)
    assert all("more parameters, as parameter.0 (who freezes" in text for text in warned)


@pytest.mark.parametrize("algorithm", [LocalSGD(every=4), Decentralized(), AsyncModelAverage()])
@pytest.mark.parametrize("differs", [True, False])
def test_what_is_frozen_and_not_the_same_on_all_ranks_is_told(everyone, hvd, algorithm, differs):
    """An optimizer that has not met it otherwise neither broadcasts nor averages it."""
    frozen = nn.Parameter(torch.full((5,), float(everyone.me * differs)), requires_grad=False)
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2), requires_grad=False)]
    own = [nn.Parameter(torch.zeros(2), requires_grad=False)] if everyone.me else []
    sgd = torch.optim.SGD([*params, frozen, *own], lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=algorithm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            params[0].grad = torch.ones(3)
            optimizer.step()
    told = [text for w in caught if "is frozen and not the same" in (text := str(w.message))]
    assert len(told) == (differs and everyone.me == 0 and everyone.size > 1)
    assert all(text.startswith("parameter.2 is frozen") for text in told)
    optimizer.settle()
    assert (frozen == everyone.me * differs).all()


@pytest.mark.parametrize("frozen", [True, False])
def test_ranks_that_have_not_all_stepped_a_parameter(everyone, hvd, frozen):
    """It is frozen while ranks change to gradients, or of one rank alone."""
    replica = Replica(everyone.me, "adam")
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=LocalSGD(every=2))
    for step in range(4):
        optimizer.zero_grad()
        replica.backward(step)
        if not frozen and everyone.me != everyone.size - 1:
            replica.params[1].grad = None
        optimizer.step()
    replica.params[1].requires_grad_(not frozen)
    optimizer.set_algorithm("gradient_allreduce")
    replica.params[1].requires_grad_(True)
    for step in range(3):
        optimizer.zero_grad()
        replica.backward(step)
        optimizer.step()
        assert_equal_everywhere(hvd, replica.params)


def test_gradients_after_weights_want_all_ranks(everyone, hvd):
    """One that has joined has moments that count, too; where it does not step weights stay."""
    replica = Replica(everyone.me, "momentum")
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=WeightsFirst())
    for step in range(2):
        optimizer.zero_grad()
        replica.backward(step)
        optimizer.step()
    if everyone.me > 0:
        optimizer.zero_grad()
        replica.backward(2)
        told = r"to change to Algorithm\(.*\) takes all ranks: .*has joined.* returned everywhere$"
        with pytest.raises(hvd.UsageError, match=told):
            optimizer.step()
        before = values([replica])[0]
        with pytest.raises(hvd.UsageError, match=told):
            optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(before, replica.params))
    hvd.join()


def test_another_algorithm_wants_all_ranks(everyone, hvd):
    optimizer = hvd.DistributedOptimizer(Replica(everyone.me, "sgd").optimizer)
    if everyone.me > 0:
        with pytest.raises(hvd.UsageError, match=r"to change to 'diloco' takes all.* has joined"):
            optimizer.set_algorithm("diloco")
    hvd.join()
    optimizer.set_algorithm("diloco")


def test_ranks_change_to_the_same(everyone, hvd):
    replica = Replica(everyone.me, "sgd")
    optimizer = hvd.DistributedOptimizer(replica.optimizer)
    if everyone.size > 1:
        with pytest.raises(hvd.UsageError, match=r"LocalSGD.*on rank 0.*DiLoCo.*on rank 1"):
            optimizer.set_algorithm("diloco" if everyone.me else "local_sgd")
    with pytest.raises(hvd.UsageError, match="did you mean 'decentralized'"):
        optimizer.set_algorithm("decentralised")


def test_ranks_change_at_the_same_step(everyone, hvd):
    replica = Replica(everyone.me, "sgd")
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=LocalSGD(every=4))
    for step in range(1 + everyone.me % 2):
        optimizer.zero_grad()
        replica.backward(step)
        optimizer.step()
    if everyone.size > 1:
        words = "at different steps: after 1 with the one before on rank 0, after 2 on rank 1"
        with pytest.raises(hvd.UsageError, match=words):
            optimizer.set_algorithm("diloco")
        assert optimizer.algorithm == LocalSGD(every=4)


AFTER = [
    LocalSGD(every=4),
    DiLoCo(every=3),
    Decentralized(every=3, peers="ring", hierarchical=False),
    "low_precision_decentralized",
    "gradient_allreduce",
    AsyncModelAverage(warmup_steps=3),
]


@pytest.fixture
def often(monkeypatch):
    """Replicas are compared every few steps, for which all ranks have to be at the same one."""
    config = dataclasses.replace(world().config, check_replicas_every=5)
    monkeypatch.setattr(world(), "config", config)


def go_on_together(hvd, replica, optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        replica.backward(step)
        optimizer.step()
    assert len(set(hvd.allgather_object(optimizer.progress))) == 1
    optimizer.settle()
    assert_equal_everywhere(hvd, replica.params)


@pytest.mark.parametrize("algorithm", AFTER, ids=repr)
def test_ranks_that_went_at_their_own_pace_go_on_in_step(everyone, hvd, algorithm, often):
    apart = AsyncModelAverage(sync_interval_ms=0.0)
    replica, optimizer = real(everyone, hvd, "sgd", apart, 2 + 3 * everyone.me)
    optimizer.set_algorithm(algorithm)
    assert set(hvd.allgather_object(optimizer.progress)) == {(3 * everyone.size - 1,) * 2 + (0,)}
    go_on_together(hvd, replica, optimizer, 9)


class ThenApart(Algorithm):
    def at(self, step: int) -> Algorithm:
        return self if step < 2 else AsyncModelAverage(sync_interval_ms=1e9)


@pytest.mark.parametrize(
    "apart",
    [
        AsyncModelAverage(sync_interval_ms=1e9),
        AsyncModelAverage(sync_interval_ms=1e9, warmup_steps=2),
        ThenApart(),
    ],
    ids=repr,
)
def test_ranks_that_went_at_their_own_pace_resume_with_their_own_weights(everyone, hvd, apart):
    steps = 4 + everyone.me
    replica, optimizer = real(everyone, hvd, "momentum", apart, steps)
    state = copy.deepcopy((values([replica])[0], optimizer.state_dict()))
    replica = Replica(everyone.me, "momentum")
    put(replica, state[0])
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=apart)
    optimizer.load_state_dict(state[1])
    assert optimizer.progress[0] == steps
    optimizer.param_groups[0]["lr"] = 0.0
    if optimizer.algorithm.when == "background":  # if it has only come to that, none begins either
        optimizer.pause()
    replica.backward(steps)
    optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(replica.params, state[0]))
    optimizer.settle()


@pytest.mark.parametrize("algorithm", AFTER[:-1], ids=repr)
def test_another_algorithm_resumes_from_where_each_had_gone(everyone, hvd, algorithm, often):
    apart = AsyncModelAverage(sync_interval_ms=0.0)
    _, saved = real(everyone, hvd, "sgd", apart, 2 + 3 * everyone.me)
    saved.settle()
    state = copy.deepcopy(saved.state_dict())
    replica = Replica(everyone.me, "sgd")
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=algorithm)
    optimizer.load_state_dict(state)
    go_on_together(hvd, replica, optimizer, 11)


@pytest.mark.parametrize("algorithm", RESUMABLE[1:], ids=repr)
def test_a_checkpoint_between_a_change_and_the_next_step(everyone, hvd, algorithm):
    """What counts steps goes on counting."""
    replica, optimizer = real(everyone, hvd, "momentum", "gradient_allreduce", 3)
    optimizer.set_algorithm(algorithm)
    state = copy.deepcopy((values([replica])[0], optimizer.state_dict()))
    again = Replica(everyone.me, "momentum")
    put(again, state[0])
    resumed = hvd.DistributedOptimizer(again.optimizer, algorithm=algorithm)
    resumed.load_state_dict(state[1])
    for step in range(3, 9):
        for each, its in ((replica, optimizer), (again, resumed)):
            its.zero_grad()
            each.backward(step)
            its.step()
        assert all(torch.equal(a, b) for a, b in zip(replica.params, again.params))


def test_an_algorithm_that_is_refused_changes_nothing(everyone, hvd):
    param = nn.Parameter(torch.ones(5, dtype=torch.float64))
    sgd = torch.optim.SGD([param], lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=LocalSGD(every=2))
    for step in range(6):
        if step == 3:
            with pytest.raises(hvd.UsageError, match="32 and 16 bits"):
                optimizer.set_algorithm("low_precision_decentralized")
            assert optimizer.algorithm == LocalSGD(every=2)
        optimizer.zero_grad()
        (param * everyone.me).sum().backward()
        optimizer.step()
    optimizer.set_algorithm("gradient_allreduce")
    right = torch.full_like(param, 1 - 0.6 * (everyone.size - 1) / 2)
    torch.testing.assert_close(param.detach(), right.detach())


def test_weights_changed_while_they_travel(everyone, hvd):
    replica = Replica(everyone.me, "sgd")
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm="decentralized")
    for step in range(2):
        replica.backward(step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        with torch.no_grad():
            replica.params[0].clamp_(-0.1, 0.1)
    assert any("changed while" in str(warning.message) for warning in caught)
    assert replica.params[0].abs().max() <= 0.1


def test_parameters_come_and_go(everyone, hvd):
    replica = Replica(everyone.me, "sgd")
    optimizer = hvd.DistributedOptimizer(
        replica.optimizer, algorithm=Decentralized(hierarchical=False)
    )
    more = nn.Parameter(torch.zeros(2, 2))
    for step in range(4):
        replica.backward(step)
        optimizer.step()
        if step == 1:
            optimizer.add_param_group({"params": [more]})
            replica.params[1].requires_grad_(False)
    optimizer.settle()
    assert optimizer.consensus_distance() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_types(everyone, hvd, dtype):
    params = [nn.Parameter(torch.full((300,), 1.0 + everyone.me, dtype=dtype))]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.0),
        algorithm=Decentralized(peers="all", when="step", hierarchical=False),
    )
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert (params[0] == 1).all(), "they begin as rank 0's"
    with torch.no_grad():
        params[0] += everyone.me
    optimizer.step()
    expected = torch.tensor(1 + (everyone.size - 1) / 2, dtype=torch.float32).to(dtype)
    assert (params[0] == expected).all()


def test_what_is_about_gradients_only_is_refused(hvd):
    param = nn.Parameter(torch.zeros(4))
    sgd = torch.optim.SGD([param], lr=0.1)
    for options in ({"op": hvd.Sum}, {"compression": hvd.Compression.fp16}):
        with pytest.raises(hvd.UsageError, match="LocalSGD"):
            hvd.DistributedOptimizer(sgd, algorithm="local_sgd", **options)
    whole = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(hvd.UsageError, match="complex64"):
        hvd.DistributedOptimizer(torch.optim.SGD([whole], lr=0.1), algorithm="decentralized")


def test_replicas_begin_equal(everyone, hvd):
    replica = Replica(everyone.me, "sgd")
    with torch.no_grad():
        for param in replica.params:
            param += everyone.me
    algorithm = dataclasses.replace(Decentralized(), when="step", hierarchical=False)
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=algorithm)
    replica.optimizer.param_groups[0]["lr"] = 0.0
    replica.backward(0)
    optimizer.step()
    assert torch.equal(replica.params[0].detach(), noise(99, 0, SHAPES[0]))


def test_neighbors_copies_cannot_do_without_a_rank(everyone, hvd):
    replica = Replica(everyone.me, "sgd")
    optimizer = hvd.DistributedOptimizer(
        replica.optimizer, algorithm=LowPrecisionDecentralized(hierarchical=False)
    )
    replica.step(0)
    optimizer.step()
    if everyone.me == 0 and everyone.size > 1:
        replica.step(1)
        with pytest.raises(hvd.UsageError, match=r"has joined, .* send weights as they are$"):
            optimizer.step()
    hvd.join()


def test_thawing_keeps_what_ranks_have_learned(everyone, hvd):
    replica = Replica(everyone.me, "sgd")
    replica.params[1].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(replica.optimizer, algorithm=LocalSGD(every=100))
    replica.optimizer.param_groups[0]["lr"] = 0.0
    for step in range(3):
        replica.backward(step)
        optimizer.step()
    with torch.no_grad():
        replica.params[0] += everyone.me
    replica.params[1].requires_grad_(True)
    replica.backward(3)
    optimizer.step()
    expected = noise(99, 0, SHAPES[0]) + (everyone.size - 1) / 2
    torch.testing.assert_close(replica.params[0].detach(), expected, rtol=1e-5, atol=1e-5)


def test_parameters_come_while_an_average_is_on_its_way(everyone, hvd):
    replica = Replica(everyone.me, "sgd")
    optimizer = hvd.DistributedOptimizer(
        replica.optimizer, algorithm=AsyncModelAverage(sync_interval_ms=0.0)
    )
    for step in range(6):
        replica.backward(step)
        optimizer.step()
        if step == 2:
            if everyone.me:
                optimizer.pause()
            more = nn.Parameter(torch.zeros(3))
            optimizer.add_param_group({"params": [more]})
    optimizer.settle()
    assert optimizer.consensus_distance() < 1e-12
