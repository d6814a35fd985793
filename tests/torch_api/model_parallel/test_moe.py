"""Experts spread over ranks against one process that has them all."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn

from bagua.common.world import world

pytestmark = pytest.mark.ranks(1, 2, 3)

WIDTH = 4


def expert(number: int) -> nn.Module:
    generator = torch.Generator().manual_seed(number)
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return module


class Net(nn.Module):
    def __init__(self, layer, experts) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.last = nn.Linear(WIDTH, 1)
        generator = torch.Generator().manual_seed(99)
        with torch.no_grad():
            for module in (self.first, self.last, layer.gate.wg):
                for param in module.parameters():
                    param.copy_(torch.randn(param.shape, generator=generator))
        for mine, number in zip(layer.experts.experts, experts):
            mine.load_state_dict(expert(number).state_dict())

    def forward(self, inputs, used=None):
        out, loss, _ = self.layer(self.first(inputs), used)
        return (self.last(out) ** 2).mean() + 0.1 * loss


@pytest.fixture
def alone(everyone, bagua):
    """A group of this rank only: what one process would do."""
    groups = [bagua.new_group([rank]) for rank in everyone.ranks]
    return groups[everyone.me]


@pytest.fixture(params=[True, False], ids=["during backward", "after backward"])
def overlap(request, monkeypatch, bagua):
    monkeypatch.setattr(world(), "overlaps", lambda busy_threads: request.param)


def built(bagua, everyone, local, group=None, **choices):
    layer = bagua.model_parallel.moe.MoE(
        WIDTH,
        expert(0),
        local if group is None else local * everyone.size,
        process_group=group,
        **choices,
    )
    first = everyone.me * local if group is None else 0
    return Net(layer, range(first, first + layer.num_local_experts))


def inputs_of(rank, step, rows):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 3, WIDTH, generator=generator)


ROWS = {
    "equal": lambda rank: 5,
    "unequal": lambda rank: 2 + 3 * rank,
    "none": lambda rank: 3 * rank,
}


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("k", [1, 2])
def test_equals_one_process_with_all_experts(everyone, bagua, alone, overlap, k, rows):
    """Also where some rows find no place; training goes on by what Adam has seen of gradients."""
    choices = {"k": k, "capacity_factor": 0.7, "min_capacity": 1}
    net, oracle = (built(bagua, everyone, 2, group, **choices) for group in (None, alone))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    reference = torch.optim.Adam(oracle.parameters(), lr=0.01)
    net.with_bagua([optimizer], "gradient_allreduce")
    rows_of = ROWS[rows]
    ranks = [rank for rank in everyone.ranks if rows_of(rank)]
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        mine = inputs_of(everyone.me, step, rows_of(everyone.me))
        loss = net(mine) if len(mine) else net(mine).nan_to_num()
        (loss if len(mine) else loss * 0).backward()
        for rank in ranks:
            (oracle(inputs_of(rank, step, rows_of(rank))) / everyone.size).backward()
        compare(net, oracle, everyone, lambda tensor: tensor.grad)
        optimizer.step()
        reference.step()
        compare(net, oracle, everyone, lambda tensor: tensor.detach())


def compare(net, oracle, everyone, of) -> None:
    right = dict(oracle.named_parameters())
    for name, param in net.named_parameters():
        parts = name.split(".")
        if "experts" in parts:
            parts[3] = str(everyone.me * net.layer.num_local_experts + int(parts[3]))
        theirs = of(right[".".join(parts)])
        theirs = torch.zeros_like(param) if theirs is None else theirs
        torch.testing.assert_close(of(param), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bytegrad", "decentralized", "low_precision_decentralized"])
def test_experts_stay_different(everyone, bagua, name):
    """By algorithms that exchange weights, too; gates and the rest are shared."""
    from bagua.torch import allgather_object

    net = built(bagua, everyone, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net.with_bagua([optimizer], name)
    for step in range(3):
        optimizer.zero_grad()
        net(inputs_of(everyone.me, step, 4)).backward()
        optimizer.step()
    for distributed in bagua.training.distributed_optimizers(net):
        distributed.settle()
    everyones = allgather_object([param.detach() for param in net.parameters()])
    for number, (param, named) in enumerate(zip(net.parameters(), net.named_parameters())):
        equal = [torch.equal(theirs[number], param) for theirs in everyones]
        if bagua.model_parallel.moe.is_moe_param(param):
            assert equal == [rank == everyone.me for rank in everyone.ranks], named[0]
        else:
            assert all(equal), named[0]


def test_sums_are_refused(everyone, bagua):
    """Experts' gradients are averages, and would be small beside sums."""
    from bagua import algorithms
    from bagua.torch import DistributedOptimizer, Sum

    net = built(bagua, everyone, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    summing = bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm(average=False)
    attempts = [
        lambda: net.with_bagua([optimizer], summing),
        lambda: DistributedOptimizer(optimizer, net.named_parameters(), op=Sum),
        lambda: DistributedOptimizer(
            optimizer,
            net.named_parameters(),
            algorithm={"layer.experts.*": algorithms.ByteGrad(op=Sum)},
        ),
    ]
    for attempt in attempts:
        if everyone.size == 1:
            attempt()
            continue
        with pytest.raises(ValueError, match=f"is an expert's.* by {everyone.size} for steps"):
            attempt()
    if everyone.size > 1:
        net.with_bagua([optimizer], "gradient_allreduce")
        with pytest.raises(ValueError, match=r"layer\.experts.* is an expert's"):
            net.with_bagua([optimizer], summing)
    # What a list names is another matter: its gradient is that of this rank's loss in any case.
    other = nn.Linear(1, 1)
    other._ddp_params_and_buffers_to_ignore = ["bias"]
    other.with_bagua([torch.optim.SGD(other.parameters(), lr=0.01)], summing)


@pytest.mark.ranks(2)
def test_in_a_group(everyone, bagua):
    group = bagua.new_group([everyone.size - 1])
    if everyone.me == 0:
        with pytest.raises(ValueError, match="not in the layer's process_group"):
            bagua.model_parallel.moe.MoE(WIDTH, expert(0), process_group=group)
    else:
        layer = bagua.model_parallel.moe.MoE(WIDTH, expert(0), 3, process_group=group)
        assert layer.num_experts == 3
        assert layer(torch.ones(2, WIDTH))[0].shape == (2, WIDTH)


@pytest.mark.ranks(1, 2)
def test_copies_know_their_experts(everyone, bagua):
    moe = bagua.model_parallel.moe
    net = built(bagua, everyone, 2)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assigned = copy.deepcopy(net)
    assigned.load_state_dict(net.state_dict(), assign=True)
    saved = torch.load(file, weights_only=False)
    for clone in (net, copy.deepcopy(net), saved, assigned, copy.deepcopy(net).double()):
        marked = [name for name, param in clone.named_parameters() if moe.is_moe_param(param)]
        assert len(marked) == 8
        assert all("experts" in name for name in marked)
        dtype = clone.first.weight.dtype
        clone(inputs_of(everyone.me, 0, 2).to(dtype)).backward()


@pytest.mark.ranks(2)
def test_another_number_of_ranks(everyone, bagua):
    net = built(bagua, everyone, 2)
    net.layer.num_experts = 6
    with pytest.raises(ValueError, match="6 experts were made on 3 ranks, here are 2"):
        net.layer._asked(torch.ones(8, WIDTH), 2)


# ---- the gate ----------------------------------------------------------------------------------


def routed(bagua, logits, used=None, train=True, **choices):
    """What a gate makes of these logits."""
    logits = torch.tensor(logits, dtype=torch.float32)
    gate = bagua.model_parallel.moe.TopKGate(logits.shape[1], logits.shape[1], **choices)
    gate.train(train)
    with torch.no_grad():
        gate.wg.weight.copy_(torch.eye(logits.shape[1]))
    return gate(logits, used)


@pytest.mark.ranks(1)
def test_places(bagua):
    logits = [[9, 1, 0], [8, 2, 0], [7, 0, 1], [0, 5, 4]]
    one = routed(bagua, logits, min_capacity=2)
    assert (one.capacity, one.slots.tolist()) == (2, [[0, 1, 6, 2]])
    assert one.counts.tolist() == [3, 1, 0]
    p = torch.tensor(logits, dtype=torch.float32).softmax(1)
    torch.testing.assert_close(
        one.weights, torch.stack([p[0, 0], p[1, 0], p[2, 0] * 0, p[3, 1]])[None]
    )
    loss = 3 * (p.mean(0) * torch.tensor([3 / 4, 1 / 4, 0])).sum()
    torch.testing.assert_close(one.auxiliary_loss, loss)
    two = routed(bagua, logits, k=2, capacity_factor=0.75, min_capacity=1)
    # first choices: expert 0 takes rows 0 and 1, expert 1 row 3; second: 1 takes row 0, 2 the last
    assert (two.capacity, two.slots.tolist()) == (2, [[0, 1, 6, 2], [3, 6, 4, 5]])
    torch.testing.assert_close(two.weights.sum(0), torch.ones(4))
    assert two.weights[:, 1].tolist() == [1, 0]
    torch.testing.assert_close(two.weights[0, 0], p[0, 0] / (p[0, 0] + p[0, 1]))


@pytest.mark.ranks(1)
def test_rows_that_do_not_count(bagua):
    logits = [[9, 0], [9, 0], [0, 9], [9, 0]]
    used = torch.tensor([True, False, True, True])
    padded = routed(bagua, logits, used, min_capacity=1)
    short = routed(bagua, [logits[0], logits[2], logits[3]], min_capacity=1)
    assert padded.slots.tolist() == [[0, 4, 2, 1]]
    assert padded.counts.tolist() == short.counts.tolist() == [2, 1]
    torch.testing.assert_close(padded.auxiliary_loss, short.auxiliary_loss)
    with pytest.raises(ValueError, match="used_token is of 4 rows, there are 2"):
        routed(bagua, logits[:2], used)


@pytest.mark.parametrize("k", [1, 2])
def test_rows_that_do_not_count_may_be_anything(everyone, bagua, k):
    layer = built(bagua, everyone, 2, k=k).layer
    rows = inputs_of(everyone.me, 0, 2).view(6, WIDTH)
    used = torch.tensor([True, False, True, True, False, True])
    results = []
    for filler in (0.0, torch.nan, torch.inf):
        layer.zero_grad()
        padded = rows.masked_fill(~used.unsqueeze(1), filler).requires_grad_()
        out, loss, _ = layer(padded, used)
        (out.square().sum() + loss).backward()
        results.append([out, loss, padded.grad, *(param.grad for param in layer.parameters())])
    for one, *others in zip(*results):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("k", [1, 2])
def test_capacity(bagua, k):
    """No expert has more rows than places, and none is dropped where there are places for all."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(37, 5, generator=generator).tolist()
    for train, factor in ((True, 0.5), (False, 2.0)):
        routing = routed(
            bagua, logits, k=k, train=train, capacity_factor=0.5, eval_capacity_factor=2.0
        )
        assert routing.capacity == max(math.ceil(k * factor * 37 / 5), 4)
        kept = routing.slots[routing.slots < 5 * routing.capacity]
        assert len(kept.unique()) == len(kept)
        assert ((routing.slots < 5 * routing.capacity) == (routing.weights > 0)).all()
    whole = routed(bagua, logits, k=k, capacity_factor=5.0)
    assert (whole.slots < 5 * whole.capacity).all()


@pytest.mark.ranks(1)
def test_noise(bagua):
    torch.manual_seed(0)
    logits = [[math.log(3.0), 0.0, -50.0]] * 4000
    plain = routed(bagua, logits, capacity_factor=9.0)
    assert plain.counts.tolist() == [4000, 0, 0]
    drawn = routed(bagua, logits, noisy_gate_policy="RSample", capacity_factor=9.0)
    assert drawn.counts[0] / 4000 == pytest.approx(0.75, abs=0.03)
    assert drawn.counts[2] == 0
    quiet = routed(
        bagua, logits, train=False, noisy_gate_policy="RSample", eval_capacity_factor=9.0
    )
    assert quiet.counts.tolist() == [4000, 0, 0]
    second = routed(bagua, logits, k=2, noisy_gate_policy="RSample", capacity_factor=9.0)
    assert second.counts.tolist() == [4000, 0, 0]  # the first choice is not drawn
    near = [[0.0, 1e-3]] * 400
    jittered = routed(bagua, [[5.0, 5.001]] * 400, noisy_gate_policy="Jitter")
    assert 100 < jittered.counts[0] < 300
    assert routed(bagua, near).counts.tolist() == [0, 400]


@pytest.mark.ranks(1)
def test_what_cannot_be(bagua):
    moe = bagua.model_parallel.moe.MoE
    for choices, message in (
        ({"k": 3}, "k=3 of 4 experts"),
        ({"num_local_experts": 1, "k": 2}, "k=2 of 1 experts"),
        ({"num_local_experts": 0}, "at least 1, not 0"),
        ({"capacity_factor": 0}, "capacity_factor is above 0, not 0"),
        ({"min_capacity": -5}, "min_capacity is a number of rows, 0 or more, not -5"),
        ({"min_capacity": 1.5}, "min_capacity is a number of rows, 0 or more, not 1.5"),
        ({"noisy_gate_policy": "rsample"}, "did you mean 'RSample'"),
    ):
        with pytest.raises(ValueError, match=message):
            moe(WIDTH, nn.Identity(), **{"num_local_experts": 4, **choices})
    assert moe(WIDTH, nn.Identity(), 4, min_capacity=0)(torch.ones(0, WIDTH))[0].shape == (0, WIDTH)
    with pytest.raises(ValueError, match="an expert keeps the shape"):
        moe(WIDTH, nn.Linear(WIDTH, 2), 2)(torch.ones(2, WIDTH))
