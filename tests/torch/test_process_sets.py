"""Operations among some of the ranks."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from torch.testing import assert_close

from bagua.torch import standing

pytestmark = pytest.mark.ranks(3, 4)


@pytest.fixture
def pair(hvd):
    """The first and the last rank."""
    process_set = hvd.add_process_set([hvd.size() - 1, 0])
    yield process_set
    hvd.remove_process_set(process_set)


@pytest.fixture
def members(pair, everyone):
    """Ranks of the set, and this rank's place among them or None."""
    ranks = [0, everyone.size - 1]
    return ranks, ranks.index(everyone.me) if everyone.me in ranks else None


def test_every_operation(everyone, hvd, pair, members):
    ranks, place = members
    tensors = everyone.draw((4, 3))
    ours = [tensors[rank] for rank in ranks]
    if place is None:
        return
    mine = tensors[everyone.me]
    total = ours[0] + ours[1]
    assert_close(hvd.allreduce(mine, op=hvd.Sum, process_set=pair), total)
    assert_close(hvd.allreduce(mine, process_set=pair), total / 2)
    assert_close(hvd.grouped_allreduce([mine], process_set=pair)[0], total / 2)
    assert torch.equal(hvd.allgather(mine, process_set=pair), torch.cat(ours))
    blocks = [tensor[2 * place : 2 * place + 2] for tensor in ours]
    assert torch.equal(hvd.alltoall(mine, process_set=pair), torch.cat(blocks))
    half = (total / 2)[2 * place : 2 * place + 2]
    assert_close(hvd.reducescatter(mine, process_set=pair), half)
    # a root is a rank of the world
    assert torch.equal(hvd.broadcast(mine, everyone.size - 1, process_set=pair), ours[1])
    hvd.barrier(process_set=pair)


def test_gradients(everyone, hvd, pair, members):
    ranks, place = members
    if place is None:
        return
    upstream = everyone.draw((4,), seed=1)
    for operation in (hvd.allreduce, hvd.allgather):
        x = torch.ones(4 if operation is hvd.allreduce else 2, requires_grad=True)
        operation(x, process_set=pair).backward(upstream[everyone.me])
        mean = (upstream[ranks[0]] + upstream[ranks[1]]) / 2
        mine = mean if operation is hvd.allreduce else mean[2 * place : 2 * place + 2]
        assert_close(x.grad, mine)


def test_a_rank_outside_is_refused_and_the_set_goes_on(everyone, hvd, pair, members):
    _, place = members
    assert pair.included() == (place is not None)
    for operation in (hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall):
        if place is None:
            with pytest.raises(ValueError, match="not in process set"):
                operation(torch.ones(2), process_set=pair)
        else:
            operation(torch.ones(2), process_set=pair)
    if place is None:
        with pytest.raises(ValueError, match="not in process set"):
            hvd.broadcast_parameters({"weight": torch.ones(2)}, 0, process_set=pair)


def test_a_join_ends_when_its_set_is_removed(everyone, hvd):
    ranks = hvd.add_process_set([0, everyone.size - 1])
    errors = []

    def join():
        with pytest.raises(hvd.BaguaError, match="process set") as error:
            hvd.join(process_set=ranks)
        errors.append(error)

    thread = threading.Thread(target=join, daemon=True)
    if everyone.me == 0:
        thread.start()
        time.sleep(0.1)  # lets the join arrive first
    hvd.barrier()
    hvd.remove_process_set(ranks)
    if everyone.me == 0:
        thread.join(30)
        assert errors
    hvd.barrier()


def test_root_outside(everyone, hvd, pair, members):
    if members[1] is not None:
        with pytest.raises(ValueError, match="root 1 is not in the process set of ranks 0, "):
            hvd.broadcast(torch.ones(2), 1, process_set=pair)


def test_sets_work_at_the_same_time_as_the_world(everyone, hvd, pair, members):
    world = [hvd.allreduce_async(torch.ones(2), name=f"w{i}", op=hvd.Sum) for i in range(5)]
    if members[1] is not None:
        inner = [
            hvd.allreduce_async(torch.ones(2), name=f"w{i}", op=hvd.Sum, process_set=pair)
            for i in range(5)
        ]
        assert all(hvd.synchronize(handle)[0] == 2 for handle in reversed(inner))
    assert all(hvd.synchronize(handle)[0] == everyone.size for handle in world)


def test_objects_and_parameters(everyone, hvd, pair, members):
    _, place = members
    if place is None:
        return
    last = everyone.size - 1
    value = hvd.broadcast_object({"rank": everyone.me}, last, process_set=pair)
    assert value == {"rank": last}
    assert hvd.allgather_object("x" * everyone.me, process_set=pair) == ["", "x" * last]
    weight = torch.full((3,), float(everyone.me))
    hvd.broadcast_parameters([("weight", weight)], last, process_set=pair)
    assert weight.tolist() == [last] * 3
    handle = hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "eye", process_set=pair)
    assert_close(hvd.synchronize(handle).to_dense(), torch.eye(3))


def test_a_set_that_is_not_in_use(hvd):
    process_set = hvd.ProcessSet([0, 1])
    with pytest.raises(ValueError, match="not in use"):
        hvd.allreduce(torch.ones(2), process_set=process_set)


def test_bad_sets(everyone, hvd):
    with pytest.raises(ValueError, match="twice"):
        hvd.ProcessSet([0, 1, 0])
    with pytest.raises(ValueError, match="does not exist"):
        hvd.add_process_set([0, everyone.size])
    with pytest.raises(ValueError, match="at least one rank"):
        hvd.add_process_set([])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == everyone.size


def test_sets_given_to_an_init_of_a_running_world(everyone, hvd):
    pair = hvd.ProcessSet([0, everyone.size - 1])
    hvd.init(process_sets=[pair])
    hvd.init(process_sets=[pair])  # in use already
    assert pair.included() == (everyone.me in pair.ranks)
    hvd.barrier(process_set=pair) if pair.included() else None
    hvd.remove_process_set(pair)
    hvd.init(process_sets="dynamic")
    with pytest.raises(ValueError, match=r"process_sets='dynamik' is unknown.* mean 'dynamic'"):
        hvd.init(process_sets="dynamik")


def test_optimizers_of_overlapping_sets_share_a_backward(everyone, hvd, monkeypatch):
    """In whatever order their gradients come. One rank counts its set's optimizers."""
    rest = hvd.add_process_set(list(range(1, everyone.size)))
    monkeypatch.setattr(standing, "_numbers", itertools.count(10**6 + (everyone.me == 0)))
    models, numbers = [], []
    for process_set in [hvd.global_process_set, rest][: 2 if everyone.me > 0 else 1]:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(sgd, process_set=process_set)
        numbers.append(optimizer._standing.number)
        models.append((model, optimizer))
    assert set(numbers) == {10**6 + 1}  # else the test is of nothing
    for _ in range(2):
        losses = [model(torch.full((1, 2), float(everyone.me))).sum() for model, _ in models]
        if everyone.me == 1:  # the last is first in backward
            losses = [model(torch.ones(1, 2)).sum() for model, _ in reversed(models)]
        sum(losses).backward()
        for _, optimizer in models:
            optimizer.step()
            optimizer.zero_grad()
    ranks = [list(everyone.ranks), list(everyone.ranks)[1:]]
    for (model, _), members in zip(models, ranks):
        expected = 1 - 2 * 0.5 * sum(members) / len(members)
        assert_close(model.weight.detach(), torch.full((1, 2), expected))
    hvd.remove_process_set(rest)
