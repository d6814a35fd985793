"""Adam whose momentum travels, against one loop that simulates all ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import numpy as np
import pytest
import torch
from common.simulation import Simulation
from torch import nn

from bagua.algorithms import Algorithm, QAdam
from bagua.common.world import world

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = [(30, 50), (7,)]


def gradient(rank: int, step: int, shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def trained(
    everyone, hvd, algorithm, steps: int, resume_at: int = -1, forgets: bool = False, **options
):
    """Parameters after so many steps; groups differ in their betas. `forgets` as of old."""

    def make():
        params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        groups = [{"params": params[:1], "betas": (0.8, 0.9)}, {"params": params[1:]}]
        inner = hvd.QAdam(groups, lr=0.01, warmup_steps=3, **options)
        return params, hvd.DistributedOptimizer(inner, algorithm=algorithm)

    params, optimizer = make()
    for step in range(steps):
        if step == resume_at:
            state = copy.deepcopy((params, optimizer.state_dict()))
            for each in state[1]["state"].values() if forgets else ():
                del each["variance_steps"]
            params, optimizer = make()
            optimizer.load_state_dict(state[1])
            with torch.no_grad():
                torch._foreach_copy_(params, state[0])
        optimizer.zero_grad()
        loss = sum(
            (param * gradient(everyone.me, step, param.shape)).sum() + param.square().sum()
            for param in params
        )
        loss.backward()
        optimizer.step()
    return params


def simulated(n: int, steps: int, weight_decay: float, decoupled: bool, least: float = 0.01):
    """Exact momentum of all ranks, from the formulas."""
    results = []
    for shape, (b1, b2) in zip(SHAPES, [(0.8, 0.9), (0.9, 0.999)]):
        x = torch.ones(shape, dtype=torch.float64)
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for step in range(steps):
            grads = [gradient(rank, step, shape).double() + 2 * x for rank in range(n)]
            if not decoupled:
                grads = [g + weight_decay * x for g in grads]
            mean = sum(grads) / n
            m = b1 * m + (1 - b1) * mean
            if step < 3:
                v = b2 * v + (1 - b2) * mean.square()
            if decoupled:
                x = x * (1 - 0.01 * weight_decay)
            frozen_at = min(step + 1, 3)
            variance = v / (1 - b2**frozen_at)
            if step >= 3:
                variance = variance.clamp(min=least * variance.mean())
            corrected = variance.sqrt() + 1e-8
            x = x - 0.01 * (m / (1 - b1 ** (step + 1))) / corrected
        results.append(x)
    return results


@pytest.mark.parametrize("least", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("decay", [(0.0, False), (0.1, False), (0.1, True)])
def test_exact_momentum_is_the_formula(everyone, hvd, decay, least):
    """That of 1-bit Adam where no variance counts as more than it is."""
    weight_decay, decoupled = decay
    algorithm = QAdam(codec="raw", error_feedback=None, warmup_steps=3)
    options = {"weight_decay": weight_decay, "decoupled": decoupled, "least_variance": least}
    params = trained(everyone, hvd, algorithm, 8, **options)
    expected = simulated(everyone.size, 8, weight_decay, decoupled, least)
    for param, goal in zip(params, expected):
        torch.testing.assert_close(param.double(), goal, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["minmax_u8", "sign1"])
def test_through_a_codec_replicas_stay_equal(everyone, hvd, codec):
    algorithm = QAdam(codec=codec, warmup_steps=3, hierarchical=False)
    params = trained(everyone, hvd, algorithm, 8)
    for theirs in hvd.allgather_object(params):
        assert all(torch.equal(a, b) for a, b in zip(theirs, params))
    near = 0.02 if codec == "minmax_u8" else 0.2
    for param, expected in zip(params, simulated(everyone.size, 8, 0.0, False)):
        assert (param - expected).abs().max() < near


@pytest.mark.parametrize(
    ("codec", "feedback"), [("minmax_u8", True), ("minmax_u8", False), ("sign1", True)]
)
@pytest.mark.parametrize("decay", [(0.0, False), (0.1, False), (0.1, True)])
def test_through_a_codec_is_what_one_loop_over_all_ranks_gives(
    everyone, hvd, codec, feedback, decay
):
    weight_decay, decoupled = decay
    algorithm = QAdam(codec=codec, warmup_steps=3, hierarchical=False, error_feedback=feedback)
    params = trained(everyone, hvd, algorithm, 8, weight_decay=weight_decay, decoupled=decoupled)
    n, shape, (b1, b2) = everyone.size, SHAPES[0], (0.8, 0.9)
    simulation = Simulation(algorithm.plan(None, None, 3), n, 30 * 50)
    x = torch.ones(shape)
    m, v = torch.zeros(shape), torch.zeros(shape)
    for step in range(8):
        grads = [gradient(rank, step, shape) + 2 * x for rank in range(n)]
        grads = [g + (0 if decoupled else weight_decay) * x for g in grads]
        if step < 3:
            mean = sum(grads) / n
            m = b1 * m + (1 - b1) * mean
            v = b2 * v + (1 - b2) * mean.square()
            root = (v / (1 - b2 ** (step + 1))).sqrt() + 1e-8
            move = m / root
        else:
            if step == 3:
                variance = v / (1 - b2**3)
                root = variance.clamp(min=0.01 * variance.mean()).sqrt() + 1e-8
            said = [((b1 * m + (1 - b1) * g) / root).numpy().ravel() for g in grads]
            move = torch.from_numpy(simulation.mean(np.stack(said))).view(shape)
            m = move * root
        x = x * (1 - 0.01 * weight_decay * decoupled) - 0.01 / (1 - b1 ** (step + 1)) * move
    # Of a value at the border of two codes rounding may choose the other one.
    far = ~torch.isclose(params[0], x, rtol=1e-5, atol=1e-5)
    assert far.float().mean() < 0.01


def test_by_name_on_one_machine_it_warms_up_as_long_as_the_optimizer(everyone, hvd):
    exact = trained(everyone, hvd, QAdam(codec="raw", error_feedback=None, warmup_steps=3), 6)
    named = trained(everyone, hvd, "qadam", 6)
    for a, b in zip(exact, named):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # one machine: exact inside it
    with pytest.raises(hvd.UsageError, match="warmup_steps is 5"):
        trained(everyone, hvd, QAdam(warmup_steps=5), 1)


@pytest.mark.parametrize("resume_at", [1, 3, 5])
def test_resumes_in_the_same_bits(everyone, hvd, resume_at):
    algorithm = QAdam(codec="minmax_u4", warmup_steps=3, hierarchical=False)
    whole = trained(everyone, hvd, algorithm, 7)
    resumed = trained(everyone, hvd, algorithm, 7, resume_at)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed))


EXACT = QAdam(codec="raw", error_feedback=None, warmup_steps=4)
CODED = QAdam(codec="minmax_u8", hierarchical=False, warmup_steps=4)


def with_gaps(everyone, hvd, algorithm, how: str, resume_at: int = -1):
    """8 steps, of which all ranks leave out the second and the sixth."""

    def make():
        params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        inner = hvd.QAdam(params, lr=0.01, warmup_steps=4)
        return params, hvd.DistributedOptimizer(inner, algorithm=algorithm)

    params, optimizer = make()
    for step in range(8):
        if step == resume_at:
            state = copy.deepcopy((params, optimizer.state_dict()))
            params, optimizer = make()
            optimizer.load_state_dict(state[1])
            with torch.no_grad():
                torch._foreach_copy_(params, state[0])
        left_out = step in (1, 5)
        params[0].requires_grad_(how == "skipped" or not left_out)
        optimizer.zero_grad()
        loss = sum((p * gradient(everyone.me, step, p.shape)).sum() for p in params)
        if left_out and how == "skipped" and everyone.me == everyone.size - 1:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
    return params


@pytest.mark.parametrize("how", ["skipped", "frozen"])
def test_steps_that_are_missing_in_the_warm_up(everyone, hvd, how, monkeypatch):
    """Its end is that of the driver, which counts them, and the variance is of the others."""
    config = dataclasses.replace(world().config, check_finite="skip")
    monkeypatch.setattr(world(), "config", config)
    x = torch.ones(SHAPES[0], dtype=torch.float64)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for taken, step in enumerate((0, 2, 3, 4, 6, 7), 1):
        g = sum(gradient(rank, step, x.shape).double() for rank in everyone.ranks) / everyone.size
        m = 0.9 * m + 0.1 * g
        if step < 4:
            v = 0.999 * v + 0.001 * g.square()
        variance = v / (1 - 0.999 ** min(taken, 3))
        if step >= 4:
            variance = variance.clamp(min=0.01 * variance.mean())
        x = x - 0.01 * (m / (1 - 0.9**taken)) / (variance.sqrt() + 1e-8)
    params = with_gaps(everyone, hvd, EXACT, how)
    torch.testing.assert_close(params[0].double(), x, rtol=1e-4, atol=1e-5)
    params = with_gaps(everyone, hvd, CODED, how)
    for theirs in hvd.allgather_object(params):
        assert all(torch.equal(a, b) for a, b in zip(theirs, params))


@pytest.mark.parametrize("resume_at", [2, 3, 4, 7])
def test_resumes_in_the_same_bits_though_steps_are_missing(everyone, hvd, resume_at, monkeypatch):
    config = dataclasses.replace(world().config, check_finite="skip")
    monkeypatch.setattr(world(), "config", config)
    whole = with_gaps(everyone, hvd, CODED, "skipped")
    resumed = with_gaps(everyone, hvd, CODED, "skipped", resume_at)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed))


@pytest.mark.parametrize("resume_at", [1, 3, 5])
def test_takes_up_older_states_in_the_same_bits(everyone, hvd, resume_at):
    """They do not say of how many steps their variance is: all that there were in the warm-up."""
    whole = trained(everyone, hvd, QAdam(warmup_steps=3), 7)
    resumed = trained(everyone, hvd, QAdam(warmup_steps=3), 7, resume_at, forgets=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed))


@pytest.mark.ranks(1)
def test_a_longer_warm_up_goes_on(hvd):
    """Its variance moves again."""
    param = nn.Parameter(torch.ones(3, 3))
    short = hvd.QAdam([param], warmup_steps=2)
    for step in range(4):
        param.grad = gradient(0, step, (3, 3))
        short.step()
    longer = hvd.QAdam([param], warmup_steps=7)
    longer.load_state_dict(short.state_dict())
    before = longer.state[param]["variance"].clone()
    for step in range(5):
        param.grad = gradient(0, step, (3, 3))
        longer.step()
    assert not torch.equal(longer.state[param]["variance"], before)


def test_alone_it_is_the_same_optimizer(everyone, hvd):
    param, twin = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    alone = hvd.QAdam([param], lr=0.01, warmup_steps=2)
    together = hvd.DistributedOptimizer(
        hvd.QAdam([twin], lr=0.01, warmup_steps=2),
        algorithm=QAdam(codec="raw", error_feedback=None, warmup_steps=2),
    )
    for step in range(5):
        for one, optimizer in ((param, alone), (twin, together)):
            optimizer.zero_grad()
            (one * gradient(0, step, (5,))).sum().backward()
            optimizer.step()
    torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


def test_bad_arguments(hvd):
    param = nn.Parameter(torch.ones(5))
    for options, words in (
        ({"warmup_steps": 0}, "at least 1"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (0.9,)}, "two numbers"),
        ({"lr": float("inf")}, "lr is a number from 0 on, not inf"),
        ({"lr": -1.0}, "lr"),
    ):
        with pytest.raises(hvd.UsageError, match=words):
            hvd.QAdam([param], **options)
    sgd = torch.optim.SGD([param], lr=0.1)
    with pytest.raises(hvd.UsageError, match=r"use bagua\.torch\.QAdam"):
        hvd.DistributedOptimizer(sgd, algorithm=Algorithm(what="momentum", warmup_steps=1))


def test_values_without_a_gradient_in_the_warm_up_are_not_lost(everyone, hvd):
    """Their variance is 0, and whatever a codec adds to their momentum must not move them far."""
    param = nn.Parameter(torch.zeros(40, 50))
    inner = hvd.QAdam([param], lr=0.01, warmup_steps=3)
    algorithm = QAdam(warmup_steps=3, hierarchical=False)
    optimizer = hvd.DistributedOptimizer(inner, algorithm=algorithm)
    for step in range(12):
        optimizer.zero_grad()
        seen = torch.ones(40, 50)
        if step < 8:
            seen[:, ::2] = 0
        (param * seen * gradient(everyone.me, step, (40, 50))).sum().backward()
        optimizer.step()
        assert param.abs().max() < 1  # of 12 steps of 0.01, where variances are small ones
    assert (param[:, ::2] != 0).all()


def test_a_parameter_that_comes_after_the_warm_up(hvd):
    param, late = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    inner = hvd.QAdam([param], lr=0.01, warmup_steps=1)
    optimizer = hvd.DistributedOptimizer(inner, algorithm="qadam")
    for _ in range(2):
        optimizer.zero_grad()
        param.sum().backward()
        optimizer.step()
    optimizer.add_param_group({"params": [late]})
    optimizer.zero_grad()
    with pytest.raises(hvd.UsageError, match="had no step in the warm-up"):
        (param.sum() + late.sum()).backward()


def test_one_rank_loads_in_the_warm_up_s_wake(everyone, hvd):
    """The others get only how far training has come, and nobody waits for anybody."""
    first = [nn.Parameter(torch.ones(30, 30))]
    saved = hvd.DistributedOptimizer(
        hvd.QAdam(first, warmup_steps=2), algorithm=QAdam(warmup_steps=2, hierarchical=False)
    )
    second = [nn.Parameter(torch.ones(30, 30))]
    optimizer = hvd.DistributedOptimizer(
        hvd.QAdam(second, warmup_steps=2), algorithm=QAdam(warmup_steps=2, hierarchical=False)
    )

    def step(params, optimizer, number):
        optimizer.zero_grad()
        (params[0] * gradient(everyone.me, number, (30, 30))).sum().backward()
        optimizer.step()

    for number in range(4):
        step(first, saved, number)
    if everyone.me == 0:
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    hvd.broadcast_optimizer_state(optimizer, 0)
    for number in range(4, 6):
        step(second, optimizer, number)
    for theirs in hvd.allgather_object(second):
        assert torch.equal(theirs[0], second[0])


@pytest.mark.parametrize("unscaled_before", [True, False])
def test_a_grad_scaler_is_refused_before_it_does_harm(everyone, hvd, unscaled_before):
    param = nn.Parameter(torch.ones(30, 30))
    optimizer = hvd.DistributedOptimizer(hvd.QAdam([param], warmup_steps=2), algorithm="qadam")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    if unscaled_before:
        scaler.unscale_(optimizer)
    with pytest.raises(hvd.UsageError, match="momentum before a GradScaler could"):
        scaler.step(optimizer)
    assert (param == 1).all()
    optimizer.step()  # without it
    assert (param != 1).all()


@pytest.mark.parametrize("dense", [True, False])
def test_sparse_gradients_are_refused_unless_made_dense(everyone, hvd, dense):
    table = nn.Embedding(10, 4, sparse=True)
    hvd.broadcast_parameters(table.state_dict())
    first = nn.Parameter(torch.ones(5))
    inner = hvd.QAdam([first, *table.parameters()], warmup_steps=1)
    optimizer = hvd.DistributedOptimizer(inner, algorithm="qadam", sparse_as_dense=dense)
    for _step in range(3):
        optimizer.zero_grad()
        (first.sum() + table(torch.tensor([everyone.me, 9])).sum()).backward()
        if not dense:
            with pytest.raises(hvd.UsageError, match="QAdam's momentum is not: use sparse_as"):
                optimizer.step()
            assert (first == 1).all()  # it is all or nothing
            return
        optimizer.step()
    assert all(torch.equal(t, table.weight) for t in hvd.allgather_object(table.weight.detach()))


@pytest.mark.parametrize("skips", [False, True])
def test_clipping_what_has_become_momentum_is_warned_of(everyone, hvd, recwarn, skips):
    layer = nn.Linear(3, 1)
    algorithm = QAdam(warmup_steps=2)
    optimizer = hvd.DistributedOptimizer(
        hvd.QAdam(layer.parameters(), lr=0.01, warmup_steps=2), algorithm=algorithm
    )

    def step(clips: bool) -> list[str]:
        recwarn.clear()
        optimizer.zero_grad()
        layer(torch.ones(2, 3)).square().mean().backward()
        optimizer.synchronize()
        if clips:
            nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
        with optimizer.skip_synchronize() if skips else contextlib.nullcontext():
            optimizer.step()
        return [str(warning.message) for warning in recwarn]

    said = [step(clips) for clips in (True, True, False, True)]
    assert not any("clip" in text for texts in said[:3] for text in texts)
    assert any("as by clipping" in text for text in said[3])
