"""Operations among some of the ranks, under their numbers in the group."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.ranks(3, 4)


@pytest.fixture
def pair(bagua):
    """The first and the last rank."""
    return bagua.new_group([bagua.get_world_size() - 1, 0])


@pytest.fixture
def place(pair, everyone):
    """This rank's number in the pair, or None."""
    return {0: 0, everyone.size - 1: 1}.get(everyone.me)


def test_every_operation(everyone, bagua, pair, place):
    comm = pair.get_global_communicator()
    tensors = everyone.draw((4,))
    ours = [tensors[0], tensors[-1]]
    mine = tensors[everyone.me]
    expected = {
        "allreduce": ours[0] + ours[1],
        "broadcast": ours[1],
        "allgather": torch.cat(ours),
        "gather": torch.cat(ours) if place == 1 else torch.zeros(8),
        "reduce_scatter": (ours[0] + ours[1]).view(2, 2)[place or 0],
        "alltoall": torch.cat([tensor.view(2, 2)[place or 0] for tensor in ours]),
        "scatter": ours[1].view(2, 2)[place or 0],
    }
    results = {name: torch.zeros_like(right) for name, right in expected.items()}
    results["broadcast"].copy_(mine if place is not None else torch.zeros(4))
    bagua.allreduce(mine, results["allreduce"], comm=comm)
    bagua.broadcast(results["broadcast"], 1, comm)
    bagua.allgather(mine, results["allgather"], comm)
    bagua.gather(mine, results["gather"], 1, comm)
    bagua.reduce_scatter(mine, results["reduce_scatter"], comm=comm)
    bagua.alltoall(mine, results["alltoall"], comm)
    bagua.scatter(mine, results["scatter"], 1, comm)
    bagua.barrier(comm)
    for name, right in expected.items():
        # an operation does nothing on a rank outside
        assert torch.equal(results[name], right if place is not None else 0 * right), name
    assert bagua.broadcast_object(place, 1, comm) == (1 if place is not None else None)


def test_the_default_group(everyone, bagua):
    from bagua.torch_api.communication import _get_default_group

    comm = _get_default_group().get_global_communicator()
    assert (comm.rank(), comm.nranks()) == (bagua.env.get_rank(), bagua.env.get_world_size())
    total = torch.ones(1)
    bagua.allreduce_inplace(total, comm=comm)
    assert total.item() == everyone.size


def test_messages_in_a_group(bagua, pair, place):
    if place == 0:
        bagua.send(torch.ones(3), 1, pair)
    result = torch.zeros(3)
    if place == 1:
        bagua.recv(result, 0, pair)
        assert result.tolist() == [1] * 3


def test_what_a_group_says(everyone, bagua, pair, place):
    assert pair.ranks == [0, everyone.size - 1]
    assert pair.nranks() == 2
    if place is None:
        with pytest.raises(ValueError, match="not in process set"):
            pair.rank()
    else:
        assert pair.rank() == place


def test_a_group_may_be_made_twice(everyone, bagua, pair):
    assert bagua.new_group(pair.ranks) == pair
    assert bagua.new_group().ranks == list(everyone.ranks)
    result = torch.zeros(1)
    bagua.allreduce(torch.ones(1), result, comm=bagua.new_group())
    assert result.item() == everyone.size


def test_bad_groups(everyone, bagua):
    with pytest.raises(ValueError, match="twice"):
        bagua.new_group([0, 0])
    with pytest.raises(ValueError, match="does not exist"):
        bagua.new_group([0, everyone.size])
