"""Bagua's names and arguments, what becomes of them, and training with each."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from bagua import algorithms
from bagua.common.kinds import Average, Sum
from bagua.common.world import counters, world

NAMES = [
    "gradient_allreduce",
    "bytegrad",
    "decentralized",
    "low_precision_decentralized",
    "qadam",
    "async",
]


@pytest.mark.ranks(1)
def test_gradient_allreduce(bagua):
    from bagua.algorithms import GradientAllreduce

    kind = bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm
    assert kind().made() == GradientAllreduce(op=Average, hierarchical=False)
    assert kind(True, False).made() == GradientAllreduce(op=Sum, hierarchical=True)


@pytest.mark.ranks(1)
def test_bytegrad(bagua):
    from bagua.algorithms import ByteGrad

    kind = bagua.algorithms.bytegrad.ByteGradAlgorithm
    assert kind().made() == ByteGrad()
    assert kind(hierarchical=False, average=False).made() == ByteGrad(op=Sum, hierarchical=False)


@pytest.mark.ranks(1)
def test_decentralized(bagua):
    from bagua.algorithms import Decentralized, LowPrecisionDecentralized

    module = bagua.algorithms.decentralized
    assert module.DecentralizedAlgorithm().made() == Decentralized(peers="all", every=1)
    shifting = module.DecentralizedAlgorithm(False, "shift_one", 3).made()
    assert shifting == Decentralized(peers="shift_one", every=3, hierarchical=False)
    low = module.LowPrecisionDecentralizedAlgorithm(communication_interval=2)
    assert low.made() == LowPrecisionDecentralized(every=2, hierarchical=True)


@pytest.mark.ranks(1)
def test_q_adam(bagua):
    from bagua.algorithms import QAdam

    module = bagua.algorithms.q_adam
    params = [nn.Parameter(torch.ones(2))]
    optimizer = module.QAdamOptimizer(
        params, lr=0.1, warmup_steps=7, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1
    )
    assert module.QAdamAlgorithm(optimizer).made() == QAdam(warmup_steps=7)
    assert not module.QAdamAlgorithm(optimizer, hierarchical=False).made().hierarchical


@pytest.mark.ranks(1)
def test_async_model_average(bagua):
    from bagua.algorithms import AsyncModelAverage

    kind = bagua.algorithms.async_model_average.AsyncModelAverageAlgorithm
    assert kind().made() == AsyncModelAverage(sync_interval_ms=500)
    assert kind("all", 20, 3).made() == AsyncModelAverage(sync_interval_ms=20, warmup_steps=3)
    with pytest.raises(ValueError, match="peer_selection_mode='shift_one' is unknown"):
        kind("shift_one")


@pytest.mark.ranks(1)
def test_by_name(bagua):
    algorithms = bagua.algorithms
    init = algorithms.Algorithm.init
    assert init("bytegrad", hierarchical=False) == algorithms.bytegrad.ByteGradAlgorithm(False)
    for name, kind in {
        "gradient_allreduce": algorithms.gradient_allreduce.GradientAllReduceAlgorithm,
        "bytegrad": algorithms.bytegrad.ByteGradAlgorithm,
        "decentralized": algorithms.decentralized.DecentralizedAlgorithm,
        "low_precision_decentralized": algorithms.decentralized.LowPrecisionDecentralizedAlgorithm,
        "async": algorithms.async_model_average.AsyncModelAverageAlgorithm,
    }.items():
        assert type(init(name)) is kind
    with pytest.raises(ValueError, match="a QAdamOptimizer is needed, not NoneType"):
        init("qadam", q_adam_optimizer=None)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bytegard", "bytegrad"),
        ("gradient_all_reduce", "gradient_allreduce"),
        ("q_adam", "qadam"),
        ("low_precision", "low_precision_decentralized"),
    ],
)
def test_a_misspelt_name(bagua, name, meant):
    with pytest.raises(ValueError, match=f"unknown algorithm '{name}'.*did you mean '{meant}'"):
        bagua.algorithms.Algorithm.init(name)


WRONG = {
    "bytegrad": [
        ({"heirarchical": True}, "no argument heirarchical; did you mean 'hierarchical'"),
        ({"average": "no"}, "average is True or False, not 'no'"),
    ],
    "gradient_allreduce": [({"hierarchical": {"nodes": 2}}, "hierarchical is True or False, not")],
    "decentralized": [
        (
            {"peer_selection_mode": "shift-one"},
            "='shift-one' is unknown; known: .*; did you mean 'shift_one'",
        ),
        ({"peer_selection_mode": ["all"]}, r"peer_selection_mode=\['all'\] is unknown"),
        ({"communication_interval": 0}, "interval is a number of steps, at least 1, not 0"),
        ({"communication_interval": "2"}, "interval is a number of steps, at least 1, not '2'"),
    ],
    "low_precision_decentralized": [({"communication_interval": 1.5}, "at least 1, not 1.5")],
    "async": [
        ({"sync_interval_ms": -3}, "sync_interval_ms is at least 0, not -3"),
        ({"sync_interval_ms": True}, "sync_interval_ms is a number, not True"),
        ({"warmup_steps": -1}, "warmup_steps is a number of steps, not -1"),
    ],
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_argument_is_told_at_once(bagua, name):
    """By the name that the user has written."""
    kind = type(bagua.algorithms.Algorithm.init(name))
    for arguments, message in WRONG[name]:
        with pytest.raises(ValueError, match=message):
            kind(**arguments)


@pytest.mark.ranks(1)
def test_what_is_no_name_of_an_algorithm(bagua):
    for name in ({"name": "bytegrad"}, ["bytegrad"], None):
        with pytest.raises(ValueError, match=r"unknown algorithm .*; known: async, bytegrad"):
            bagua.algorithms.Algorithm.init(name)


@pytest.mark.ranks(1)
def test_a_name_that_only_the_successor_has(bagua):
    from bagua.algorithms import LocalSGD, TopK
    from bagua.torch_api.algorithms.algorithm import made

    assert made("local_sgd") == LocalSGD()
    assert made("topk") == TopK()
    assert made("async") == bagua.algorithms.Algorithm.init("async").made()
    words = "unknown algorithm 'topkk'; known: async, .*local_sgd.*; did you mean 'topk'"
    with pytest.raises(ValueError, match=words):
        made("topkk")
    with pytest.raises(ValueError, match="'sign1' is a codec"):
        made("sign1")


@pytest.mark.ranks(1)
def test_an_algorithm_can_be_copied_and_subclassed(bagua):
    one = bagua.algorithms.bytegrad.ByteGradAlgorithm(average=False)
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one

    class Mine(bagua.algorithms.Algorithm):
        def __init__(self, codec):
            self.codec = codec

        def made(self):
            from bagua.algorithms import ByteGrad

            return ByteGrad(codec=self.codec)

    assert Mine(codec="minmax_u4").made().codec == "minmax_u4"


@pytest.mark.ranks(1)
def test_what_is_almost_an_algorithm(bagua):
    kind = bagua.algorithms.bytegrad.ByteGradAlgorithm
    with pytest.raises(ValueError, match=r"not type; write ByteGradAlgorithm\(\)"):
        nn.Linear(1, 1).with_bagua([], kind)
    with pytest.raises(ValueError, match="qadam needs q_adam_optimizer: "):
        nn.Linear(1, 1).with_bagua([], "qadam")


# ---- training ----------------------------------------------------------------------------------


def built(everyone, bagua, name):
    """A model that begins otherwise on each rank, its optimizer and the algorithm."""
    torch.manual_seed(everyone.me)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    if name == "qadam":
        module = bagua.algorithms.q_adam
        optimizer = module.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)
        return model, optimizer, module.QAdamAlgorithm(optimizer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    arguments = {"sync_interval_ms": 1, "warmup_steps": 2} if name == "async" else {}
    return model, optimizer, bagua.algorithms.Algorithm.init(name, **arguments)


def train(everyone, model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + everyone.me)
        inputs = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        model(inputs).square().sum(1).mean().backward()
        optimizer.step()


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def assert_same_everywhere(model) -> None:
    from bagua.torch import allgather_object

    for theirs in allgather_object([p.detach() for p in model.parameters()]):
        assert all(torch.equal(a, b) for a, b in zip(theirs, model.parameters()))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "async"])
def test_trains_as_under_a_distributed_optimizer(everyone, bagua, name):
    """To the last bit, and after it was saved and loaded, and not if it were left alone."""
    from bagua.torch import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters

    model, optimizer, algorithm = built(everyone, bagua, name)
    oracle, inner, _ = built(everyone, bagua, name)
    alone, own, _ = built(everyone, bagua, name)
    model.with_bagua([optimizer], algorithm)
    for one in (oracle, alone):
        broadcast_parameters(one.state_dict())
    broadcast_optimizer_state(inner)
    reference = DistributedOptimizer(inner, oracle.named_parameters(), algorithm=algorithm.made())
    train(everyone, model, optimizer, 5)
    train(everyone, oracle, reference, 5)
    train(everyone, alone, own, 5)
    assert equal(model, oracle)
    assert everyone.size == 1 or not equal(model, alone)

    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer, algorithm = built(everyone, bagua, name)
    model.with_bagua([optimizer], algorithm)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(everyone, model, optimizer, 3, first=5)
    train(everyone, oracle, reference, 3, first=5)
    assert equal(model, oracle)


@pytest.mark.ranks(1, 2, 3)
def test_optimizers_can_settle(everyone, bagua):
    model, optimizer, algorithm = built(everyone, bagua, "low_precision_decentralized")
    model.with_bagua([optimizer], algorithm)
    train(everyone, model, optimizer, 3)
    optimizer.settle()
    assert_same_everywhere(model)
    del model
    gc.collect()
    assert not hasattr(optimizer, "settle")


@pytest.mark.ranks(1, 2, 3)
def test_averages_in_the_background(everyone, bagua):
    model, optimizer, algorithm = built(everyone, bagua, "async")
    model.with_bagua([optimizer], algorithm)
    for number in range(3):
        algorithm.resume(model)
        algorithm.resume(model)
        train(everyone, model, optimizer, 5, first=5 * number)
        model.bagua_algorithm.abort(model)
        model.bagua_algorithm.abort(model)
        assert_same_everywhere(model)
    train(everyone, model, optimizer, 1)
    (distributed,) = [attachment.distributed for attachment in model.bagua_training.attachments]
    assert (distributed.consensus_distance() > 0) == (everyone.size > 1)
    algorithm.abort(model)


@pytest.mark.ranks(2, 3)
def test_ranks_that_stop_at_different_steps(everyone, bagua):
    model, optimizer, _ = built(everyone, bagua, "async")
    algorithm = bagua.algorithms.Algorithm.init("async", sync_interval_ms=1)
    model.with_bagua([optimizer], algorithm)
    for _ in range(2):
        train(everyone, model, optimizer, 3 + 4 * everyone.me)
        algorithm.abort(model)
        assert_same_everywhere(model)
        algorithm.resume(model)
    algorithm.abort(model)


@pytest.mark.ranks(2)
def test_stopping_before_the_background_has_begun(everyone, bagua):
    """In the warm-up; nothing begins before `resume`."""
    model, optimizer, algorithm = built(everyone, bagua, "async")
    ddp = bagua.data_parallel.DistributedDataParallel(
        model, optimizers=[optimizer], algorithm=algorithm
    )
    ddp.bagua_algorithm.abort(ddp)
    train(everyone, ddp, optimizer, 2)
    assert_same_everywhere(model)
    train(everyone, ddp, optimizer, 1)
    before = counters()["exchanges"]
    train(everyone, ddp, optimizer, 3)
    assert counters()["exchanges"] == before
    algorithm.resume(ddp)
    while counters()["exchanges"] == before:  # in the background, so after some step
        train(everyone, ddp, optimizer, 1)
    algorithm.abort(ddp)
    assert_same_everywhere(model)


@pytest.mark.ranks(1, 2, 3)
def test_all_of_them_in_turn(everyone, bagua):
    """Switching begins with equal replicas, whatever was before, twice the same included."""
    model, optimizer, _ = built(everyone, bagua, "gradient_allreduce")
    for name in ["decentralized", "decentralized", "async", "bytegrad", *NAMES]:
        if name == "qadam":
            continue
        model.with_bagua([optimizer], bagua.algorithms.Algorithm.init(name))
        assert_same_everywhere(model)
        train(everyone, model, optimizer, 2)
    model.with_bagua([optimizer], "gradient_allreduce")
    train(everyone, model, optimizer, 1)
    assert_same_everywhere(model)


def test_the_optimizer_of_qadam_is_known(everyone, bagua):
    model, optimizer, algorithm = built(everyone, bagua, "qadam")
    ddp = bagua.data_parallel.DistributedDataParallel(model, algorithm=algorithm)
    (attachment,) = ddp.bagua_training.attachments
    assert attachment.distributed.inner is optimizer
    train(everyone, model, optimizer, 3)
    assert_same_everywhere(model)


@pytest.mark.ranks(2)
def test_what_needs_the_optimizers(everyone, bagua, monkeypatch):
    model, optimizer, _ = built(everyone, bagua, "decentralized")
    for name in ("decentralized", "low_precision_decentralized", "async"):
        with pytest.raises(ValueError, match=r"Parallel\(model, optimizers=\[optimizer\]"):
            model.with_bagua([], name)
    _, _, algorithm = built(everyone, bagua, "qadam")
    with pytest.raises(ValueError, match="which SGD does not offer"):
        model.with_bagua([optimizer], algorithm)
    config = dataclasses.replace(world().config, check_finite="skip")
    monkeypatch.setattr(world(), "config", config)
    with pytest.raises(ValueError, match="check_finite='skip' needs the optimizers"):
        model.with_bagua([], "bytegrad")


@pytest.mark.ranks(1, 2)
def test_a_step_is_skipped_where_gradients_are_no_numbers(everyone, bagua, monkeypatch):
    config = dataclasses.replace(world().config, check_finite="skip")
    monkeypatch.setattr(world(), "config", config)
    model, _, _ = built(everyone, bagua, "bytegrad")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    model.with_bagua([optimizer], "bytegrad")
    train(everyone, model, optimizer, 1)
    before = copy.deepcopy(model)
    optimizer.zero_grad()
    factor = float("inf") if everyone.me == everyone.size - 1 else 1.0
    with warnings.catch_warnings(record=True) as caught:
        (model(torch.ones(1, 6)) * factor).sum().backward()
    assert len(caught) == (everyone.me == 0)
    optimizer.step()
    assert equal(model, before)
    assert all(param.grad is not None for param in model.parameters())
    assert optimizer.state[model[0].weight]["step"] == 1
    train(everyone, model, optimizer, 1)
    assert not equal(model, before)
    assert_same_everywhere(model)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numbers_may_be_of_numpy(bagua, kind):
    """And are Python's from then on: ranks compare how an algorithm is written."""
    for name, argument in (
        ("decentralized", "communication_interval"),
        ("low_precision_decentralized", "communication_interval"),
        ("async", "sync_interval_ms"),
        ("async", "warmup_steps"),
    ):
        init = bagua.algorithms.Algorithm.init
        algorithm, right = (init(name, **{argument: two}) for two in (kind(2), 2))
        assert repr(algorithm) == repr(right)
        assert repr(algorithm.made()) == repr(right.made())
    with pytest.raises(ValueError, match="warmup_steps is a number, not True"):
        init("async", warmup_steps=np.bool_(True))
    written = repr(algorithms.Decentralized(peers="random", seed=kind(3), every=kind(2)))
    assert written == repr(algorithms.Decentralized(peers="random", seed=3, every=2))
