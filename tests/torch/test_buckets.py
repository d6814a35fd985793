"""Gradients in arenas, which users may take elsewhere."""

from __future__ import annotations

import dataclasses
import gc
import mmap
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from bagua.common.world import world
from bagua.torch.arrays import is_on_device
from bagua.torch.claims import _Claims

pytestmark = pytest.mark.ranks(1, 2, 3)
# What users do with gradients that they have got, and what torch does when a model is converted.
REPLACED = {
    "data": lambda p: setattr(p.grad, "data", p.grad.data.clamp(-1e9, 1e9)),
    "grad": lambda p: setattr(p, "grad", p.grad.clone()),
    "there and back": lambda p: setattr(p.grad, "data", p.grad.data.double().float()),
    "other strides": lambda p: setattr(p.grad, "data", p.grad.data.T.contiguous().T),
    "shared": lambda p: p.grad.share_memory_(),
    "resized": lambda p: p.grad.resize_(1).fill_(7.0),
}


# A gradient that is set to zero, or replaced by the next one.
HOW = [(how, False) for how in REPLACED if how != "resized"]
HOW += [(how, True) for how in REPLACED if how != "grad"]


@pytest.mark.parametrize(("how", "replaced"), HOW)
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "powersgd"])
@pytest.mark.parametrize("size", [4, 600])
def test_gradients_that_users_have_moved(everyone, hvd, how, replaced, algorithm, size):
    params = [nn.Parameter(torch.zeros(size, size)), nn.Parameter(torch.zeros(3, 2))]
    if how == "shared" and is_on_device(params[0]):
        pytest.skip("a device's memory stays where it is")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), algorithm=algorithm)
    for step in range(5):
        optimizer.zero_grad(set_to_none=replaced)
        weight = float(10**step) * (everyone.me + 1)
        sum((param * weight).sum() for param in params).backward()
        mean = 10**step * (everyone.size + 1) / 2
        for param in params:
            torch.testing.assert_close(param.grad, torch.full_like(param, mean), rtol=1e-4, atol=0)
        optimizer.step()
        REPLACED[how](params[step % 2])


def _move(queued):
    for grad in queued:
        grad.share_memory_()
    # What memory that is free is used for next.
    return [torch.full_like(grad, 777.0) for grad in queued for _ in range(4)]


def _start_and_move(bucket, queued, urgency):
    type(bucket).start(bucket, urgency)
    _move(queued)


def _move_and_fill(bucket, queued):
    others = _move(queued)
    type(bucket).fill(bucket)
    del others


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "powersgd"])
@pytest.mark.parametrize("held", ["results", "local", "views of local"])
@pytest.mark.parametrize(
    ("size", "moved"),
    [(8, "after"), (250, "before"), (250, "after"), (600, "before"), (600, "after")],
)
def test_gradients_that_are_moved_while_they_are_exchanged(
    everyone, hvd, algorithm, size, moved, held
):
    """As a queue to another process does in a thread of its own."""
    params = [nn.Parameter(torch.zeros(size, size)), nn.Parameter(torch.zeros(size, size))]
    if is_on_device(params[0]):
        pytest.skip("a device's memory stays where it is")
    local = []
    for param in params if held != "results" else ():
        view = (lambda grad: grad) if held == "local" else torch.Tensor.detach
        param.register_post_accumulate_grad_hook(lambda p, view=view: local.append(view(p.grad)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), algorithm=algorithm)
    for step in range(6):
        queued = [param.grad for param in params if param.grad is not None]
        if held != "results":
            queued = local
            local.clear()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = sum((param * float(10**step) * (everyone.me + 1)).sum() for param in params)
        with optimizer.no_sync():  # so that all is in the arena before it is launched
            loss.backward()
        for bucket in optimizer._driver.layout.buckets:
            if moved == "before":
                bucket.fill = partial(_move_and_fill, bucket, queued)
            else:
                bucket.start = partial(_start_and_move, bucket, queued)
        optimizer.synchronize()
        mean = 10**step * (everyone.size + 1) / 2
        for param in params:
            torch.testing.assert_close(param.grad, torch.full_like(param, mean), rtol=1e-4, atol=0)
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.parametrize("overlap", ["always", "never"])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@pytest.mark.parametrize("size", [4, 600])
@pytest.mark.parametrize("bucket_mb", [10.0, 0.001])
def test_gradients_that_go_to_other_parameters(
    everyone, hvd, monkeypatch, overlap, algorithm, size, bucket_mb
):
    config = dataclasses.replace(world().config, overlap=overlap, bucket_mb=bucket_mb)
    monkeypatch.setattr(world(), "config", config)
    params = [nn.Parameter(torch.zeros(size, size)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), algorithm=algorithm)
    # Codes have 256 levels for a range of 100: less than half of the least mean.
    tolerated = 0.0 if algorithm == "gradient_allreduce" else 0.4 * (everyone.size + 1) / 2

    def step(given, used=(0, 1, 2)):
        for _ in range(2):  # so that results are in the arena
            optimizer.zero_grad()
            sum((p * (everyone.me + 1.0)).sum() for p in params).backward()
            for param in params:
                param.grad = slots[param].given if slots else param.grad
        grads = [param.grad for param in params]
        for param, number in zip(params, given):
            param.grad = None if number is None else grads[number]
        optimizer.zero_grad(set_to_none=False)
        sum((params[i] * 10.0**i * (everyone.me + 1)).sum() for i in used).backward()
        for i, param in enumerate(params):
            mean = 10**i * (everyone.size + 1) / 2 if i in used else 0.0
            wanted = torch.full_like(param, mean)
            torch.testing.assert_close(param.grad, wanted, rtol=1e-3, atol=tolerated)

    slots = {}
    step((0, 1, 2))
    slots = optimizer._driver.layout.slots
    step((1, 0, 2))
    step((1, 2, 0))
    step((None, 0, 2), used=(1, 2))
    step((1, None, 2), used=(0, 2))


HOLDERS = {
    "another parameter": lambda p, other: setattr(other, "grad", p.grad),
    "another library": lambda p, other: np.from_dlpack(p.grad),
}


@pytest.mark.parametrize("holder", list(HOLDERS))
@pytest.mark.parametrize("size", [4, 600])
@pytest.mark.parametrize("overlap", ["always", "never"])
def test_gradients_that_others_hold_are_only_read(
    everyone, hvd, monkeypatch, overlap, size, holder
):
    config = dataclasses.replace(world().config, overlap=overlap)
    monkeypatch.setattr(world(), "config", config)
    param, other = (nn.Parameter(torch.zeros(size, size)) for _ in range(2))
    if is_on_device(param) and holder == "another library":
        pytest.skip("NumPy's memory is the host's")
    held = []
    param.register_post_accumulate_grad_hook(lambda p: held.append(HOLDERS[holder](p, other)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0))
    for step in range(3):
        held.clear()
        optimizer.zero_grad()
        other.grad = None
        mine = 10.0**step * (everyone.me + 1)
        (param * mine).sum().backward()
        mean = torch.full_like(param, 10.0**step * (everyone.size + 1) / 2)
        torch.testing.assert_close(param.grad, mean)
        seen = np.asarray(held[0]) if holder == "another library" else other.grad.numpy(force=True)
        np.testing.assert_array_equal(seen, mine)
        optimizer.step()


@pytest.mark.parametrize("size", [4, 600])
def test_memory_that_is_not_torchs_alone_is_only_read(everyone, hvd, size):
    param = nn.Parameter(torch.zeros(size, size))
    if is_on_device(param):
        pytest.skip("of the host's memory")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    array = np.full((size, size), everyone.me + 1.0, np.float32)
    param.grad = torch.from_numpy(array)
    optimizer.step()
    torch.testing.assert_close(param.grad, torch.full_like(param, (everyone.size + 1) / 2))
    assert (array == everyone.me + 1.0).all()
    param.grad = torch.full_like(param, everyone.me + 1.0).detach().share_memory_()
    file, nbytes = param.grad.untyped_storage()._share_fd_cpu_()
    with mmap.mmap(file, nbytes) as elsewhere:  # as another process has it
        optimizer.step()
        torch.testing.assert_close(param.grad, torch.full_like(param, (everyone.size + 1) / 2))
        assert (np.frombuffer(elsewhere[: param.nbytes], np.float32) == everyone.me + 1.0).all()


def test_the_arena_by_another_name_is_the_arena(everyone, hvd):
    param = nn.Parameter(torch.zeros(8))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    param.sum().backward()
    slot = optimizer._driver.layout.slots[param]
    assert slot.is_in_arena(param.grad)
    param.grad = param.grad.detach()
    assert slot.is_in_arena(param.grad)
    param.grad = param.grad.clone()
    assert not slot.is_in_arena(param.grad)


def test_gradients_can_be_detached_in_place(everyone, hvd):
    param = nn.Parameter(torch.zeros(8))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    param.sum().backward()
    assert optimizer._driver.layout.slots[param].is_in_arena(param.grad)
    param.grad.detach_()
    param.grad.zero_()


def test_a_gradient_that_overlaps_its_own_place(everyone, hvd):
    param = nn.Parameter(torch.zeros(3, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    weights = torch.arange(9.0).view(3, 3) * (everyone.me + 1)
    (param * weights).sum().backward()
    param.grad = param.grad.T
    optimizer.zero_grad(set_to_none=False)
    (param * weights).sum().backward()
    mean = torch.arange(9.0).view(3, 3) * (everyone.size + 1) / 2
    torch.testing.assert_close(param.grad, mean)


@pytest.mark.parametrize("held", [False, True])
def test_large_gradients_travel_where_they_are_if_nobody_else_has_them(everyone, hvd, held):
    param = nn.Parameter(torch.zeros(600, 600))
    had, copied = [], held or everyone.shows_memory or is_on_device(param)
    if held:
        param.register_post_accumulate_grad_hook(lambda param: had.append(param.grad))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        (param.sum() * (everyone.me + 1)).backward()
        torch.testing.assert_close(param.grad, torch.full_like(param, (everyone.size + 1) / 2))
        assert optimizer._driver.layout.slots[param].is_in_arena(param.grad) == copied
    assert all(bool((grad == everyone.me + 1).all()) for grad in had)


@pytest.mark.ranks(1)
def test_a_parameter_of_several_optimizers_that_has_died_is_nobodys(hvd):
    """Else no gradient would be exchanged in place from then on."""
    claims = _Claims()
    param = nn.Parameter(torch.ones(1))
    for _ in range(2):
        claims.add(param)
    assert claims.contested
    assert claims.is_contested(param)
    del param
    gc.collect()
    assert not claims.contested


def test_a_model_on_a_device_keeps_no_core_busy(hvd, monkeypatch):
    asked = []
    monkeypatch.setattr(world(), "overlaps", lambda busy_threads: bool(asked.append(busy_threads)))
    param = nn.Parameter(torch.zeros(3))
    hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1))
    assert asked == [0 if is_on_device(param) else torch.get_num_threads()]


@pytest.mark.parametrize("size", [1000, 100_000])  # copied by the engine, and by torch
def test_copies_into_an_arena_are_counted(hvd, size):
    params = [nn.Parameter(torch.zeros(size)) for _ in range(20)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0))

    def touched(set_to_none: bool) -> int:
        optimizer.zero_grad(set_to_none)
        before = hvd.counters()["touched_nbytes"]
        sum(param.sum() for param in params).backward()
        return hvd.counters()["touched_nbytes"] - before

    for _ in range(3):  # ranks settle on buckets
        touched(True)
        optimizer.step()
    in_place = touched(False)
    assert touched(True) - in_place == 2 * (20 * size * 4)


_MB = 1 << 18  # floats


def _counts_of_buckets(hvd, counts: list[int]) -> list[list[int]]:
    """Of parameters that are given from the last layer to the first, in which buckets are laid."""
    params = [nn.Parameter(torch.zeros(count)) for count in counts[::-1]]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    runs = optimizer._driver.layout.runs
    return [sorted((slot.param.numel() for slot in run), reverse=True) for run in runs]


def test_buckets_begin_small(everyone, hvd):
    sizes = [sum(counts) / _MB for counts in _counts_of_buckets(hvd, [_MB // 2] * 80)]
    assert sizes == [1, 1, 2, 4, 8, 10, 10, 4]


def test_a_bucket_does_not_wait_for_the_layer_after_it(everyone, hvd):
    layers = [30, 4 * _MB, 2048, 4 * _MB, 2047, 1000, 8 * _MB, 2046, 2 * _MB]
    assert _counts_of_buckets(hvd, layers) == [
        [4 * _MB, 30],
        [4 * _MB, 2048],
        [8 * _MB, 2047, 1000],
        [2 * _MB, 2046],
    ]


def test_a_tensor_larger_than_a_bucket_has_its_own(everyone, hvd):
    assert _counts_of_buckets(hvd, [_MB, 12 * _MB, _MB]) == [[_MB], [12 * _MB], [_MB]]
