"""Training that goes on from a checkpoint against training that was not interrupted."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bagua import algorithms
from bagua.torch import allgather_object, broadcast_object
from bagua.torch_api.checkpoint import files
from bagua.torch_api.checkpoint.items import digest

pytestmark = pytest.mark.ranks(1, 2, 3)

ALGORITHMS = {
    "gradient_allreduce": algorithms.GradientAllreduce(),
    "bytegrad": algorithms.ByteGrad(codec="minmax_u4", error_feedback=True, hierarchical=False),
    "topk": algorithms.TopK(density=0.1),
    "powersgd": algorithms.PowerSGD(),
    "qadam": None,
    "decentralized": algorithms.Decentralized(),
    "low_precision_decentralized": algorithms.LowPrecisionDecentralized(),
    "local_sgd": algorithms.LocalSGD(every=3),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """The same on all ranks."""
    return Path(broadcast_object(str(tmp_path))) / "checkpoints"


def built(everyone, bagua, name="gradient_allreduce", experts=False):
    torch.manual_seed(everyone.me)
    middle = nn.Linear(8, 8)
    if experts:
        middle = bagua.model_parallel.moe.MoE(8, nn.Linear(8, 8), 2, min_capacity=1)
    model = nn.ModuleList([nn.Linear(6, 8), middle, nn.BatchNorm1d(8), nn.Linear(8, 3)])
    algorithm = ALGORITHMS[name]
    if name == "qadam":
        optimizer = bagua.algorithms.q_adam.QAdamOptimizer(model.parameters(), 0.01, warmup_steps=2)
        algorithm = bagua.algorithms.q_adam.QAdamAlgorithm(optimizer)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.with_bagua([optimizer], algorithm)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def train(everyone, model, optimizer, scheduler, steps, first):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + everyone.me)
        hidden = model[0](torch.randn(5, 6, generator=generator)).tanh()
        hidden = model[1](hidden)
        hidden, loss = hidden[:2] if isinstance(hidden, tuple) else (hidden, 0.0)
        optimizer.zero_grad()
        (model[3](model[2](hidden)).square().mean() + loss).backward()
        optimizer.step()
        scheduler.step()


def tensors_of(model, optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [entry for param in params for entry in optimizer.state.get(param, {}).values()]
    return [*model.state_dict().values(), *(each for each in states if torch.is_tensor(each))]


def assert_equal(one, other) -> None:
    for a, b in zip(tensors_of(*one[:2]), tensors_of(*other[:2])):
        assert torch.equal(a, b)
    assert one[2].state_dict() == other[2].state_dict()


@pytest.mark.parametrize("experts", [False, True], ids=["plain", "experts"])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_goes_on_in_the_same_bits(everyone, bagua, folder, name, experts):
    first = built(everyone, bagua, name, experts)
    train(everyone, *first, steps=5, first=0)
    bagua.checkpoint.save_checkpoint(5, folder, *first)
    train(everyone, *first, steps=4, first=5)
    again = built(everyone, bagua, name, experts)
    assert bagua.checkpoint.load_checkpoint(folder, *again) == 5
    train(everyone, *again, steps=4, first=5)
    assert_equal(first, again)
    assert again[2].last_epoch == 9


def keys_of(path):
    return files.read(path)["items"]


def test_each_thing_is_written_once(everyone, bagua, folder):
    trained = built(everyone, bagua, experts=True)
    train(everyone, *trained, steps=2, first=0)
    bagua.checkpoint.save_checkpoint(12, folder, *trained)
    shared = keys_of(folder / "iter_0000012" / "shared.pt")
    mine = keys_of(folder / "iter_0000012" / f"rank_{everyone.me:05d}.pt")
    params = list(trained[0].named_parameters())
    for index, (name, param) in enumerate(params):
        own = bagua.model_parallel.moe.is_moe_param(param)
        for key in (("weight", name), ("state", 0, index)):
            if own and key[0] == "weight":
                assert torch.equal(mine[key], param)
                assert key not in shared
            elif own:
                assert (key in mine) == (param in trained[1].state)
                assert key not in shared
            else:
                assert (key in shared, key in mine) == (True, False), key
    # Each has seen its own batches.
    running = ("weight", "2.running_mean")
    assert running in shared
    assert (running in mine) == (everyone.me > 0)
    left = sorted(path.name for path in (folder / "iter_0000012").iterdir())
    assert left == sorted(["shared.pt", *(f"rank_{rank:05d}.pt" for rank in everyone.ranks)])
    assert (folder / files.TRACKER).read_text() == "12\n"


def test_nothing_there_yet(everyone, bagua, folder):
    assert bagua.checkpoint.load_checkpoint(folder, nn.Linear(1, 1)) == 0


def test_the_last_one_of_many_and_wrapped(everyone, bagua, folder):
    """By whichever of the objects that stand for a model and its optimizer."""
    from bagua.torch import DistributedOptimizer

    model = nn.Linear(2, 1)
    ddp = bagua.data_parallel.DistributedDataParallel(model)
    inner = torch.optim.Adam(model.parameters())
    for number in (3, 20, 4):
        nn.init.constant_(model.weight, number)
        bagua.checkpoint.save_checkpoint(number, folder, ddp, [inner])
    fresh = nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.Adam(fresh.parameters(), lr=0.5))
    assert bagua.checkpoint.load_checkpoint(folder, fresh, optimizer) == 4
    assert fresh.weight.tolist() == [[4, 4]]
    assert optimizer.param_groups[0]["lr"] == 1e-3
    with pytest.raises(ValueError, match="the checkpoint has 1 optimizers, here are 2"):
        bagua.checkpoint.load_checkpoint(folder, fresh, [optimizer, inner])
    with pytest.raises(ValueError, match="saved without an lr_scheduler"):
        bagua.checkpoint.load_checkpoint(folder, fresh, lr_scheduler=optimizer)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        bagua.checkpoint.load_checkpoint(folder, nn.Linear(2, 1, bias=False))
    assert bagua.checkpoint.load_checkpoint(folder, nn.Linear(2, 1, bias=False), strict=False) == 4


def test_one_that_fails_on_a_rank_is_no_checkpoint(everyone, bagua, folder, monkeypatch):
    trained = built(everyone, bagua)
    bagua.checkpoint.save_checkpoint(1, folder, *trained)
    before = [tensor.clone() for tensor in trained[0].state_dict().values()]
    train(everyone, *trained, steps=1, first=0)
    if everyone.me == everyone.size - 1:

        def fail(state, file):
            file.write(b"half of it")
            raise OSError("no space left")

        monkeypatch.setattr(torch, "save", fail)
    last = everyone.me == everyone.size - 1
    message = "no space left" if last else f"fails on rank {everyone.size - 1}: OSError: no space"
    with pytest.raises(OSError if last else ValueError, match=message):
        bagua.checkpoint.save_checkpoint(2, folder, *trained)
    assert not (folder / "iter_0000002" / f"rank_{everyone.size - 1:05d}.pt").exists()
    assert not [path for path in (folder / "iter_0000002").iterdir() if path.name[0] == "."]
    assert bagua.checkpoint.load_checkpoint(folder, *trained) == 1
    for tensor, right in zip(trained[0].state_dict().values(), before):
        assert torch.equal(tensor, right)


def rewritten(everyone, path, **changes) -> None:
    bagua_barrier()
    if everyone.me == 0:
        files.write(path, {**files.read(path), **changes})
    bagua_barrier()


def bagua_barrier() -> None:
    allgather_object(None)


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_another_number_of_ranks(everyone, bagua, folder, name):
    trained = built(everyone, bagua, name)
    train(everyone, *trained, steps=2, first=0)
    bagua.checkpoint.save_checkpoint(2, folder, *trained)
    rewritten(everyone, folder / "iter_0000002" / "shared.pt", ranks=7)
    again = built(everyone, bagua, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert bagua.checkpoint.load_checkpoint(folder, *again) == 2
    told = [str(each.message) for each in caught if "of 7 ranks" in str(each.message)]
    keeps = name != "gradient_allreduce" or everyone.size > 1  # BatchNorm's buffers differ
    assert len(told) == (everyone.me == 0 and keeps)
    firsts = allgather_object([tensor.clone() for tensor in trained[0].state_dict().values()])[0]
    for tensor, right in zip(again[0].state_dict().values(), firsts):
        assert torch.equal(tensor, right)
    train(everyone, *again, steps=1, first=2)


def test_what_cannot_be_loaded(everyone, bagua, folder):
    trained = built(everyone, bagua, experts=True)
    bagua.checkpoint.save_checkpoint(0, folder, *trained)
    iteration = folder / "iter_0000000"
    rewritten(everyone, iteration / "shared.pt", ranks=7)
    with pytest.raises(ValueError, match=f"experts of 7 ranks, here are {everyone.size}"):
        bagua.checkpoint.load_checkpoint(folder, *trained)
    rewritten(everyone, iteration / "shared.pt", ranks=everyone.size, token="another")
    with pytest.raises(ValueError, match="files of two checkpoints"):
        bagua.checkpoint.load_checkpoint(folder, *trained)
    bagua_barrier()
    if everyone.me == 0:
        (iteration / "shared.pt").unlink()
    bagua_barrier()
    with pytest.raises(ValueError, match=r"shared\.pt is missing"):
        bagua.checkpoint.load_checkpoint(folder, *trained)
    bagua_barrier()
    if everyone.me == 0:
        (folder / files.TRACKER).write_text("release")
    bagua_barrier()
    with pytest.raises(ValueError, match="holds 'release' in place of the number"):
        bagua.checkpoint.load_checkpoint(folder, *trained)
    for iteration in (-1, 1.5, "5", True):
        with pytest.raises(ValueError, match="iteration is a number from 0 on"):
            bagua.checkpoint.save_checkpoint(iteration, folder, *trained)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("has", ["the first", "the last"])
def test_what_some_ranks_do_not_have(everyone, bagua, folder, has):
    """As after a step that a rank has not taken."""
    who = 0 if has == "the first" else everyone.size - 1

    def fresh():
        model = nn.Linear(2, 1)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = fresh()
    if everyone.me == who:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if everyone.me == who else None
    bagua.checkpoint.save_checkpoint(1, folder, model, optimizer, scheduler)
    again, theirs = fresh()
    assert bagua.checkpoint.load_checkpoint(folder, again, theirs) == 1
    assert len(theirs.state) == (2 if everyone.me == who else 0)
    assert torch.equal(again.weight, model.weight)
    found = keys_of(folder / "iter_0000001" / f"rank_{everyone.me:05d}.pt")
    assert (("lr_scheduler",) in found) == (everyone.me == who != 0)


def test_schedulers_that_have_seen_other_losses(everyone, bagua, folder):
    def fresh():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return model, optimizer, scheduler

    first = fresh()
    for loss in (3.0, 2.0, 1.0):
        first[2].step(5.0 if everyone.me else loss)
    bagua.checkpoint.save_checkpoint(1, folder, *first)
    again = fresh()
    bagua.checkpoint.load_checkpoint(folder, *again)
    assert again[2].state_dict() == first[2].state_dict()
    assert again[2].best == (5.0 if everyone.me else 1.0)
    assert again[1].param_groups[0]["lr"] == first[1].param_groups[0]["lr"]


def test_what_is_ignored_is_no_expert(everyone, bagua, folder):
    """Each rank's own with as many ranks; with others, all can begin with the first's."""

    def fresh(start):
        model = nn.BatchNorm1d(2)
        nn.init.constant_(model.weight, start)
        nn.init.constant_(model.running_mean, start)
        model._ddp_params_and_buffers_to_ignore = ["running_mean", "weight"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model.with_bagua([optimizer], "gradient_allreduce"), optimizer

    bagua.checkpoint.save_checkpoint(2, folder, *fresh(float(everyone.me)))
    model, optimizer = fresh(9.0)
    bagua.checkpoint.load_checkpoint(folder, model, optimizer)
    assert model.running_mean.tolist() == model.weight.tolist() == [everyone.me] * 2
    rewritten(everyone, folder / "iter_0000002" / "shared.pt", ranks=7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bagua.checkpoint.load_checkpoint(folder, model, optimizer)
    assert model.running_mean.tolist() == model.weight.tolist() == [0, 0]
    told = [each for each in caught if "all begin with what rank 0 had" in str(each.message)]
    assert len(told) == (everyone.me == 0 and everyone.size > 1)


@pytest.mark.ranks(2, 3)
def test_folders_that_only_one_rank_sees(everyone, bagua, tmp_path):
    mine = tmp_path / str(everyone.me)
    with pytest.raises(ValueError, match="give a folder all ranks see"):
        bagua.checkpoint.save_checkpoint(1, mine, nn.Linear(1, 1))
    if everyone.me == 0:
        (mine / files.TRACKER).write_text("1")
    bagua_barrier()
    with pytest.raises(ValueError, match="give a folder all ranks see"):
        bagua.checkpoint.load_checkpoint(mine, nn.Linear(1, 1))


DIFFERENT = [
    [1, 12],
    [11, 2],
    [112],
    (1, 12),
    [[1], 12],
    [[1, 12]],
    ["1", "12"],
    {1: 2, 3: 4},
    {12: 34},
    {1: {2: 3}, 4: 5},
    {1: {2: 3, 4: 5}},
    {"a": 1},
    "{'a': 1}",
    None,
    "None",
    0,
    0.0,
    False,
    torch.zeros(2),
    torch.zeros(1, 2),
    torch.zeros(2, dtype=torch.float64),
    torch.zeros(2, dtype=torch.int32),
    np.zeros(5000),
    np.arange(5000) == 2500,
    np.arange(5000) == 2501,
]


@pytest.mark.ranks(1)
def test_digests(bagua):
    assert len({digest(value) for value in DIFFERENT}) == len(DIFFERENT)
    for value in DIFFERENT:
        assert digest(value) == digest(copy.deepcopy(value))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_files_are_for_whom_the_umask_lets(bagua, tmp_path, mask):
    before = os.umask(mask)
    try:
        files.write(tmp_path / "a", {"a": 1})
        files.replace(tmp_path / "b", b"")
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask
