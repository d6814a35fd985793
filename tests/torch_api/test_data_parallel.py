"""`DistributedDataParallel` as torch's, and with an algorithm."""

from __future__ import annotations

import dataclasses
import gc
import inspect

import pytest
import torch
from torch import nn

from bagua.algorithms import find
from bagua.common.errors import UsageError
from bagua.common.world import world

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.fixture
def ddp(bagua):
    return bagua.data_parallel.DistributedDataParallel


def line(everyone) -> nn.Module:
    """x -> weight * x, with another weight on each rank."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, everyone.me + 1.0)
    return module


def batch(everyone) -> torch.Tensor:
    return torch.full((1, 1), float(everyone.me))


def test_as_in_torch(everyone, bagua, ddp):
    """Nobody says which optimizer there will be."""
    model = ddp(line(everyone))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mean = (everyone.size - 1) / 2
    for step in range(3):
        optimizer.zero_grad()
        model(batch(everyone)).sum().backward()
        assert model.module.weight.grad.item() == mean
        optimizer.step()
        assert model.module.weight.item() == pytest.approx(1 - 0.5 * mean * (step + 1))


def test_its_arguments_come_in_torchs_order(bagua, ddp):
    theirs = list(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    ours = list(inspect.signature(ddp).parameters)
    assert ours[:5] == theirs[:5]
    assert set(theirs[5:12]) - {"init_sync"} <= set(ours)
    assert {"optimizers", "algorithm", "static_graph"} <= set(ours)


def test_every_argument_of_torchs_is_known(everyone, bagua, ddp):
    """With its default it may be given to either; what only torch can do is refused by name."""
    for name, parameter in inspect.signature(
        nn.parallel.DistributedDataParallel
    ).parameters.items():
        if name != "module":
            ddp(line(everyone), **{name: parameter.default})
    with pytest.raises(UsageError, match="mixed_precision is torch's own: leave it out"):
        ddp(line(everyone), mixed_precision=object())
    with pytest.raises(TypeError, match="no argument 'algoritm'"):
        ddp(line(everyone), algoritm="bytegrad")


def test_device_ids_do_not_drop_the_algorithm(everyone, bagua, ddp):
    module = line(everyone)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    algorithm = bagua.algorithms.bytegrad.ByteGradAlgorithm()
    model = ddp(
        module,
        device_ids=[0],
        output_device=0,
        find_unused_parameters=True,
        optimizers=[optimizer],
        algorithm=algorithm,
    )
    assert model.bagua_algorithm is algorithm
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    with pytest.raises(ValueError, match="a rank has one device, not 2"):
        ddp(module, device_ids=[0, 1])


def test_no_sync(everyone, bagua, ddp):
    module = line(everyone)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    model = ddp(module, optimizers=[optimizer])
    for _ in range(2):
        with model.no_sync():
            assert not model.require_backward_grad_sync
            model(batch(everyone)).sum().backward()
        assert model.require_backward_grad_sync
        assert module.weight.grad.item() == everyone.me
        model(batch(everyone)).sum().backward()
        assert module.weight.grad.item() == everyone.size - 1
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_after_a_pass_that_only_accumulated(everyone, bagua, ddp, fused):
    """What overflows on one rank is left out on all, also if the optimizer unscales by itself."""
    module = line(everyone)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, fused=fused)
    model = ddp(module, optimizers=[optimizer])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight, mean = 1.0, (everyone.size - 1) / 2
    for step in range(4):
        bad = step == 1
        with model.no_sync():
            loss = model(batch(everyone)).sum()
            overflows = bad and everyone.me == everyone.size - 1
            scaler.scale(loss + torch.inf * module.weight.sum() if overflows else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weight -= 0.0 if bad else 0.5 * mean
        assert module.weight.item() == pytest.approx(weight)
        assert scaler.get_scale() == (4.0 if step else 8.0)
    del model, module
    gc.collect()
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused, "as it was"


def test_parameters_that_some_ranks_do_not_use(everyone, bagua, ddp):
    modules = nn.ModuleList([line(everyone), line(everyone)])
    model = ddp(modules, find_unused_parameters=True)
    used = modules[everyone.me % 2]
    used(torch.ones(1, 1)).sum().backward()
    assert model is not None
    users = sum(rank % 2 == 0 for rank in everyone.ranks)
    if everyone.size > 1:
        assert modules[0].weight.grad.item() == pytest.approx(users / everyone.size)


def test_buffers_are_those_of_the_first_rank(everyone, bagua, ddp):
    module = nn.Sequential(line(everyone), nn.BatchNorm1d(1))
    model = ddp(module)
    kept = ddp(nn.BatchNorm1d(1), broadcast_buffers=False)
    for buffers in (model, kept):
        next(iter(buffers.buffers())).fill_(float(everyone.me))
    model.eval()
    model(batch(everyone))
    assert module[1].running_mean.item() == everyone.me
    model.train()
    module[1].momentum = 0.0
    model(torch.randn(4, 1))
    assert module[1].running_mean.item() == 0
    kept.module.momentum = 0.0
    kept(torch.randn(4, 1))
    assert kept.module.running_mean.item() == everyone.me


def test_state_dict_is_that_of_torchs(everyone, bagua, ddp):
    model = ddp(line(everyone))
    assert list(model.state_dict()) == ["module.weight"]
    assert model.module.weight.item() == 1


def test_what_is_no_module(bagua, ddp):
    with pytest.raises(UsageError, match="wraps a module, not 3"):
        ddp(3)
    with pytest.raises(UsageError, match="distributed already"):
        ddp(ddp(nn.Linear(2, 1)))
    with pytest.raises(UsageError, match="takes a list of optimizers"):
        ddp(nn.Linear(2, 1), optimizers=None)


def test_a_module_without_gradients(everyone, bagua, ddp):
    with pytest.raises(ValueError, match="no parameter of the module requires a gradient"):
        ddp(line(everyone).requires_grad_(False))


def test_the_setting_chooses_where_the_call_does_not(everyone, ddp, monkeypatch):
    config = dataclasses.replace(world().config, algorithm="bytegrad")
    monkeypatch.setattr(world(), "config", config)
    module = line(everyone)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    assert ddp(module, optimizers=[optimizer]).bagua_algorithm == find("bytegrad")
