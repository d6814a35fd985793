"""Gradients through codecs, against one loop that simulates all ranks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import warnings

import numpy as np
import pytest
import torch
from common.simulation import Simulation
from torch import nn

from bagua.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
    PerParameter,
    PowerSGD,
    QAdam,
    TopK,
)
from bagua.algorithms.exchange import CODECS, LOSSY, NEED_FEEDBACK, VALUE_CODECS
from bagua.common.core import core
from bagua.common.kinds import ReduceOp
from bagua.common.world import world

_SIGN1 = Algorithm(codec="sign1")

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = [(7,), (60, 90), (3,), (2, 1000)]


@pytest.fixture
def keep_order(monkeypatch, hvd):
    """Learning the order lays buckets out anew after the first step."""
    config = dataclasses.replace(world().config, learn_bucket_order=False)
    monkeypatch.setattr(world(), "config", config)


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def density(codec: str, share: float) -> dict[str, float]:
    return {"density": share} if codec == "topk" else {}


def algorithms():
    yield from (Algorithm(codec=codec) for codec in CODECS if codec != "raw")
    yield from (Algorithm(codec=codec, error_feedback=True) for codec in LOSSY)
    yield TopK(hierarchical=False, density=0.2, values="minmax_u8")


@pytest.mark.usefixtures("overlap", "keep_order")
@pytest.mark.parametrize("algorithm", list(algorithms()), ids=repr)
def test_is_what_one_loop_over_all_ranks_gives(everyone, hvd, algorithm):
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), algorithm=algorithm)
    coded = [i for i, s in enumerate(SHAPES) if not algorithm.keeps_exact("", s)]
    count = sum(params[i].numel() for i in coded)
    simulation = Simulation(algorithm.plan(None, None, 0), everyone.size, count)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        grads = [[gradient(r, step, shape) for shape in SHAPES] for r in range(everyone.size)]
        sum((p * g).sum() for p, g in zip(params, grads[everyone.me])).backward()
        flat = [np.concatenate([mine[i].numpy().ravel() for i in coded]) for mine in grads]
        right = simulation.mean(np.stack(flat))
        ours = np.concatenate([params[i].grad.numpy().ravel() for i in coded])
        assert np.array_equal(ours, right), f"step {step}"
        for i in set(range(len(SHAPES))) - set(coded):
            mean = torch.stack([mine[i] for mine in grads]).mean(0)
            torch.testing.assert_close(params[i].grad, mean)
        optimizer.step()


@pytest.mark.usefixtures("overlap")
def test_bytegrad_on_one_machine_is_exact(everyone, hvd):
    """Where the ranks share memory; those of one machine that do not are as far as any."""
    param = nn.Parameter(torch.zeros(40, 50))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0), algorithm="bytegrad")
    (param * gradient(everyone.me, 0, (40, 50))).sum().backward()
    mean = torch.stack([gradient(r, 0, (40, 50)) for r in everyone.ranks]).mean(0)
    torch.testing.assert_close(param.grad, mean)
    optimizer.step()


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("codec", LOSSY)
def test_replicas_learn_and_stay_equal(everyone, hvd, codec, dtype):
    """In any precision; float64 travels as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.LayerNorm(300), nn.ReLU(), nn.Linear(300, 1))
    model.to(dtype)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.003),
        model.named_parameters(),
        algorithm=Algorithm(codec=codec, error_feedback=True, **density(codec, 0.1)),
    )
    generator = torch.Generator().manual_seed(everyone.me)
    losses = []
    for _ in range(60):
        inputs = torch.randn(16, 8, generator=generator).to(dtype)
        loss = (model(inputs) - inputs.sum(1, keepdim=True) / 8).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach().float())))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    for theirs in hvd.allgather_object([p.detach() for p in model.parameters()]):
        assert all(torch.equal(a, b) for a, b in zip(theirs, model.parameters()))


def test_what_travels_exactly(hvd):
    lossy = Algorithm(codec="minmax_u8")
    assert lossy.keeps_exact("norm.weight", (300,))
    assert not lossy.keeps_exact("linear.weight", (300, 8))
    assert not Algorithm(codec="fp16").keeps_exact("norm.weight", (300,))
    named = Algorithm(codec="minmax_u8", exact=["head.*"])
    assert named.keeps_exact("head.weight", (10, 10))
    assert not named.keeps_exact("norm.weight", (300,))
    small = Algorithm(codec="minmax_u8", exact=lambda name, shape: shape[0] < 5)
    assert small.keeps_exact("a", (4,))
    assert "<lambda>" in repr(small)
    assert " at 0x" not in repr(small)


@pytest.mark.usefixtures("keep_order")
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "raw"])
def test_bytes_on_the_wire(everyone, hvd, codec):
    count = 4096 * 12
    param = nn.Parameter(torch.zeros(1, count))
    algorithm = Algorithm(codec=codec)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0), algorithm=algorithm)
    for _ in range(3):
        optimizer.zero_grad()
        before = hvd.counters()
        (param * gradient(everyone.me, 0, (1, count))).sum().backward()
        sent = hvd.counters()["sent_nbytes"] - before["sent_nbytes"]
        assert (hvd.counters()["codec_us"] > before["codec_us"]) == (everyone.size > 1)
    coding = Simulation(algorithm.plan(None, None, 0), everyone.size, count).coding
    n = everyone.size
    if codec == "topk":  # all to all
        assert sent == (n - 1) * coding.wire_nbytes(count)
    else:
        assert sent == 2 * (n - 1) * coding.wire_nbytes(count // n)
    optimizer.step()


def test_the_engine_knows_the_same_codecs(hvd):
    assert tuple(core.build_info()["codecs"]) == CODECS
    assert set(NEED_FEEDBACK) < set(LOSSY) < set(CODECS)
    for values in VALUE_CODECS:
        assert core.Coding("topk", 10, values).wire_nbytes(4096) > 20


MISTAKES = {
    "exact weights": (
        lambda: Algorithm(what="weight", exact=["bias"]),
        "weights travel as they are",
    ),
    "nearest": (lambda: Algorithm(codec="minmax_u9"), "did you mean 'minmax_u8'"),
    "short": (lambda: Algorithm(codec="fp8"), "did you mean 'fp8_e4m3'"),
    "no codec": (lambda: Algorithm(codec="lowrank"), "is no codec; give low_rank=2"),
    "neither": (lambda: Algorithm(codec="low_rank"), "is no codec; give low_rank=2"),
    "rank": (lambda: PowerSGD(low_rank=0), "at least 1"),
    "thin": (lambda: PowerSGD(error_feedback=False), "does not learn"),
    "adasum": (lambda: Algorithm(op=ReduceOp.Adasum, hierarchical=True), "no hierarchical form"),
    "seed": (lambda: Algorithm(what="weight", peers="ring", seed=1), "peers='random'"),
    "density": (lambda: TopK(density=0.0), "density"),
    "none of a block": (lambda: TopK(density=1e-9), "one of every 4096 values, to 1, not 1e-09"),
    "share of no topk": (
        lambda: ByteGrad(density=0.1),
        "density=0.1 is for codec='topk', .* with 'minmax_u8'",
    ),
    "values of no topk": (lambda: Algorithm(values="fp16"), "values='fp16' is for codec='topk'"),
    "topk of another": (lambda: TopK(codec="fp16"), r"Algorithm\(codec='fp16'"),
    "low precision": (
        lambda: LowPrecisionDecentralized(codec="raw"),
        r"Decentralized\(peers='ring', when='step'\)",
    ),
    "sign1": (lambda: Algorithm(codec="sign1", error_feedback=False), "does not learn"),
    "raw": (lambda: Algorithm(error_feedback=True), "loses something"),
    "max": (lambda: Algorithm(codec="fp16", op=5), "sums and averages"),
    "peers": (lambda: Algorithm(peers="shift_one"), "drift apart for ever"),
    "every": (lambda: ByteGrad(every=0), "at least 1"),
    "late": (lambda: Algorithm(every=2), "lose the gradients"),
    "when": (lambda: Algorithm(what="weight", when="backwards"), "forward' or 'step"),
    "grad later": (lambda: Algorithm(when="step"), "not 'step': the optimizer steps by the mean"),
    "momentum later": (
        lambda: QAdam(when="forward"),
        "not 'forward': it takes the place of gradients",
    ),
    "weight earlier": (
        lambda: Decentralized(when="backward"),
        "not 'backward': weights change when the optimizer steps",
    ),
    "delta any time": (
        lambda: LocalSGD(when="background"),
        "not 'background': .* all ranks have to apply it at the same",
    ),
    "what": (lambda: Algorithm(what="weights"), "did you mean 'weight'"),
    "weights": (lambda: Algorithm(what="weight", codec="fp16"), "lose too much"),
    "ring": (
        lambda: Algorithm(what="weight", peers="ring", when="step", codec="topk"),
        "says too little. Use minmax_u8",
    ),
    "ring, fed back": (
        lambda: Algorithm(what="weight", peers="ring", codec="bf16", error_feedback=True),
        "says too little. Leave error_feedback out",
    ),
    "ring, meanwhile": (
        lambda: Algorithm(what="weight", peers="ring", codec="bf16"),
        "through bf16 a ring .* at when='step', not 'forward'",
    ),
    "outer": (lambda: DiLoCo(outer_momentum=1.0), "outer_momentum"),
    "outer step": (lambda: DiLoCo(what="weight"), "outer_lr=0.7 and outer_momentum=0.9 are for"),
    "interval": (lambda: AsyncModelAverage(when="step"), "with 'step', which counts steps"),
    "no momentum": (lambda: QAdam(what="grad"), "qadam is what='momentum'"),
    "no warm-up": (lambda: QAdam(warmup_steps=0), "needs a warm-up"),
    "low rank": (lambda: PowerSGD(codec="minmax_u8"), "choose one"),
    "warm-up": (lambda: QAdam(warmup_steps=-1), "warmup_steps"),
    "pattern": (lambda: ByteGrad(exact="head.*"), "list of patterns"),
    "number": (lambda: Algorithm(codec=8), "codec is text, not 8"),
    "half": (lambda: LocalSGD(every=2.5), "every is a whole number, not 2.5"),
    "nan": (lambda: DiLoCo(outer_lr=np.nan), "outer_lr is a finite number, not nan"),
    "inf": (lambda: AsyncModelAverage(sync_interval_ms=np.inf), "sync_interval_ms is a finite"),
    "text": (lambda: TopK(density="0.1"), "density is a finite number, not '0.1'"),
    "flag": (lambda: ByteGrad(hierarchical="no"), "hierarchical is True or False, not 'no'"),
    "feedback": (lambda: ByteGrad(error_feedback=1), "error_feedback is True, False or None"),
    "op": (lambda: Algorithm(op="average"), "op is bagua.Average, Sum or another of them"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_what_makes_no_sense_is_refused_at_once(hvd, mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises(hvd.UsageError, match=words):
        make()


def test_what_does_not_fit_the_optimizer_is_refused(everyone, hvd):
    param = nn.Parameter(torch.zeros(4, 4))
    sgd = torch.optim.SGD([param], lr=0.1)
    for options in ({"op": hvd.Max}, {"op": hvd.Adasum}, {"compression": hvd.Compression.fp16}):
        with pytest.raises(hvd.UsageError, match="codec"):
            hvd.DistributedOptimizer(sgd, algorithm="bytegrad", **options)
    if everyone.size > 1:
        algorithm = Algorithm(codec="fp16") if everyone.me else ByteGrad()
        with pytest.raises(hvd.UsageError, match=r"ByteGrad\(\) on rank 0.*fp16.*on rank 1"):
            hvd.DistributedOptimizer(sgd, algorithm=algorithm)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (TopK(density=0.01), TopK(density=0.02)),
        (ByteGrad(), ByteGrad(error_feedback=True)),
        (DiLoCo(every=4), DiLoCo(every=5)),
        (DiLoCo(outer_lr=0.7), DiLoCo(outer_lr=0.5)),
        (Algorithm(codec="sign1", exact=["head.*"]), Algorithm(codec="sign1", exact=["body.*"])),
        (Decentralized(peers="random", seed=1), Decentralized(peers="random", seed=2)),
        ({"w": TopK(density=0.01)}, {"w": TopK(density=0.02)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("late", [False, True])
def test_one_rank_with_another_setting_is_an_error_on_all(everyone, hvd, usual, odd, late):
    """That names both; and nobody has to start anew."""
    last = everyone.size - 1
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(40, 40))], lr=0.1)
    algorithm = odd if everyone.me == last else usual
    both = [re.escape(str(PerParameter(a) if isinstance(a, dict) else a)) for a in (usual, odd)]
    words = f"algorithms differ between ranks: {both[0]} on rank 0, {both[1]} on rank {last}"
    choose = functools.partial(hvd.DistributedOptimizer, sgd)
    if late:
        choose = choose().set_algorithm
    with pytest.raises(hvd.UsageError, match=words):
        choose(algorithm=algorithm)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == everyone.size


class _Backwards(nn.ModuleList):
    """Applies the last layer first, so that gradients come in the order of the parameters."""

    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


def _resumable(hvd, bucket_mb: float, algorithm=_SIGN1):
    torch.manual_seed(0)
    sizes = (20, 60, 90, 70, 8)
    model = _Backwards(nn.Linear(b, a) for a, b in zip(sizes, sizes[1:]))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    before = world().config
    world().config = dataclasses.replace(before, bucket_mb=bucket_mb)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    world().config = before
    return model, optimizer


def _step(everyone, model, optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(gradient(everyone.me, step, (16, 8))).square().mean().backward()
    optimizer.step()


def _assert_equal_replicas(hvd, model) -> None:
    for theirs in hvd.allgather_object([p.detach() for p in model.parameters()]):
        assert all(torch.equal(a, b) for a, b in zip(theirs, model.parameters()))


def _trained(
    hvd,
    everyone,
    steps: int,
    resume_at: int = -1,
    change=None,
    bucket_mb: float = 0.02,
    algorithm=_SIGN1,
):
    """A model after some steps, in the middle of which everything may be saved and made anew."""
    model, optimizer = _resumable(hvd, bucket_mb, algorithm)
    for step in range(steps):
        if step == resume_at:
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, optimizer = _resumable(hvd, bucket_mb, algorithm)
            model.load_state_dict(state[0])
            optimizer.load_state_dict(change(state[1]) if change else state[1])
        _step(everyone, model, optimizer, step)
    return model


# Residuals, or nothing but blocks that begin where the layout of buckets puts them.
@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("algorithm", [_SIGN1, ByteGrad(hierarchical=False, exact=())], ids=repr)
@pytest.mark.parametrize("bucket_mb", [0.02, 25])
@pytest.mark.parametrize("resume_at", [0, 1, 4])
def test_resumes_in_the_same_bits(everyone, hvd, resume_at, bucket_mb, algorithm):
    how = {"bucket_mb": bucket_mb, "algorithm": algorithm}
    whole = _trained(hvd, everyone, 7, **how)
    resumed = _trained(hvd, everyone, 7, resume_at, **how)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))


@pytest.mark.usefixtures("overlap")
def test_one_rank_loads_and_broadcasts(everyone, hvd, recwarn):
    model, optimizer = _resumable(hvd, 0.02)
    for step in range(3):
        _step(everyone, model, optimizer, step)
    state = optimizer.state_dict()
    model, optimizer = _resumable(hvd, 0.02)
    if everyone.me == 0:
        optimizer.load_state_dict(state)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(2):
        _step(everyone, model, optimizer, step)
    _assert_equal_replicas(hvd, model)
    warned = [str(w.message) for w in recwarn if "begins anew" in str(w.message)]
    assert bool(warned) == (everyone.size > 1)


@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm(codec="sign1", error_feedback=True),
        "local_sgd",
        "diloco",
        Algorithm(what="delta", codec="minmax_u8", when="forward", every=2),
        "decentralized",
        "low_precision_decentralized",
    ],
    ids=str,
)
def test_one_rank_goes_back_while_training(everyone, hvd, algorithm):
    model = nn.Linear(8, 300)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    for step in range(3):
        _step(everyone, model, optimizer, step)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for step in range(3):
        _step(everyone, model, optimizer, step)
    if everyone.me == 0:
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    sgd.param_groups[0]["lr"] = 0.0
    for step in range(4):
        _step(everyone, model, optimizer, step)
    optimizer.settle()
    _assert_equal_replicas(hvd, model)
    loaded = hvd.broadcast_object(before[0])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, loaded[name], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("algorithm", list(algorithms()), ids=repr)
def test_recovers_from_one_bad_step(everyone, hvd, algorithm):
    """A loss scaler skips it; no residual may remember it."""
    param = nn.Parameter(torch.zeros(30, 300))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0), algorithm=algorithm)
    for step in range(4):
        optimizer.zero_grad()
        values = gradient(everyone.me, step, (30, 300))
        if step == 1 and everyone.me == 0:
            values[3, 5] = torch.inf
            values[20, 7] = torch.nan
        (param * values).sum().backward()
        assert bool(param.grad.isfinite().all()) == (step != 1)
        optimizer.step()


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("algorithm", list(algorithms()), ids=repr)
def test_a_loss_scaler_skips_what_overflows_on_one_rank(everyone, hvd, algorithm):
    """On all ranks alike, and training recovers."""
    algorithm = dataclasses.replace(algorithm, **density(algorithm.codec, 0.2))
    param = nn.Parameter(torch.zeros(30, 300))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.2), algorithm=algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=10)
    goals = [gradient(rank, 0, (30, 300)) for rank in everyone.ranks]
    scales = [64.0]
    # What fp16 cannot hold once it is scaled, or nothing can.
    bad = 1e4 if algorithm.codec == "fp16" else torch.inf
    for step in range(25):
        optimizer.zero_grad()
        before = param.detach().clone()
        loss = (param - goals[everyone.me]).square().sum() / 2
        if step == 3 and everyone.me == everyone.size - 1:
            loss = loss + bad * param[20, 7]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(param, before) == (step == 3), f"step {step}"
        kept = optimizer.state_dict().get("bagua", {"kept": {"lost": {}}})["kept"]["lost"]
        assert all(lost.isfinite().all() for losts in kept.values() for lost in losts)
    assert scales[4] == scales[3] / 2
    assert scales[-1] > scales[4]
    for theirs in hvd.allgather_object((param.detach(), scales)):
        assert torch.equal(theirs[0], param)
        assert theirs[1] == scales
    goal = torch.stack(goals).mean(0)
    assert (param - goal).norm() < 0.4 * goal.norm()


WIDE = {torch.float64: torch.float64, torch.complex64: torch.complex128}


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("dtype", list(WIDE))
@pytest.mark.parametrize("algorithm", list(algorithms()), ids=repr)
def test_what_no_codec_carries_travels_as_it_is(everyone, hvd, algorithm, dtype):
    """Among others that are encoded."""
    params = [nn.Parameter(torch.zeros(30, 50, dtype=kind)) for kind in (dtype, torch.float32)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), algorithm=algorithm)
    for step in range(3):
        optimizer.zero_grad()
        grads = everyone.draw((30, 50), dtype, seed=step)
        loss = (params[0] * grads[everyone.me].conj()).real.sum()
        (loss + (params[1] * gradient(everyone.me, step, (30, 50))).sum()).backward()
        mean = torch.stack([grad.to(WIDE[dtype]) for grad in grads]).mean(0)
        torch.testing.assert_close(params[0].grad, mean.to(dtype), rtol=1e-6, atol=1e-7)
        if dtype == torch.float64:
            torch.testing.assert_close(params[0].grad, mean, rtol=1e-14, atol=1e-15)
        optimizer.step()
    kept = optimizer.state_dict().get("bagua", {"kept": {"lost": {}}})["kept"]["lost"]
    assert not any(lost.any() for lost in kept.get("parameter.0", []))


@pytest.mark.ranks(2)
def test_weights_that_no_codec_carries_are_refused(hvd):
    """Neighbors keep copies of all or of none."""
    params = [nn.Parameter(torch.zeros(5, 5)), nn.Parameter(torch.zeros(5, 5).double())]
    sgd = torch.optim.SGD(params, lr=0.1)
    with pytest.raises(hvd.UsageError, match=r"wide is torch\.float64; codecs carry floats of 32"):
        hvd.DistributedOptimizer(
            sgd, zip(["narrow", "wide"], params), algorithm="low_precision_decentralized"
        )


def test_nothing_to_encode(hvd):
    param, other = nn.Parameter(torch.zeros(0, 5)), nn.Parameter(torch.zeros(5))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param, other], lr=0.0), algorithm=Algorithm(codec="sign1")
    )
    (param.sum() + other.sum()).backward()
    assert param.grad.shape == (0, 5)
    assert (other.grad == 1).all()
    optimizer.step()


def test_the_optimizers_state_is_broadcast_without_it(everyone, hvd):
    param = nn.Parameter(torch.zeros(4, 4))
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=Algorithm(codec="sign1"))
    (param * gradient(everyone.me, 0, (4, 4))).sum().backward()
    optimizer.step()
    kept = optimizer.state_dict()["bagua"]["kept"]["lost"]["parameter.0"][0]
    hvd.broadcast_optimizer_state(optimizer, 0)
    again = optimizer.state_dict()["bagua"]["kept"]["lost"]["parameter.0"][0]
    assert torch.equal(again, kept)
    assert everyone.size == 1 or kept.any()


@pytest.mark.parametrize("algorithm", [_SIGN1, DiLoCo(every=2), Algorithm(codec="raw")], ids=repr)
def test_goes_on_with_another_algorithm_than_the_checkpoint(everyone, hvd, algorithm, recwarn):
    blocks = ByteGrad(hierarchical=False)
    for before, after in ((blocks, algorithm), (algorithm, blocks)):
        model, optimizer = _resumable(hvd, 0.02, before)
        _step(everyone, model, optimizer, 0)
        own = {k: v for k, v in optimizer.state_dict().items() if k == "bagua"}
        model, optimizer = _resumable(hvd, 0.02, after)
        optimizer.load_state_dict(optimizer.state_dict() | copy.deepcopy(own))
        for step in range(1, 5):
            _step(everyone, model, optimizer, step)
        optimizer.settle()
        _assert_equal_replicas(hvd, model)


def test_what_an_algorithm_has_no_use_for_is_dropped(everyone, hvd):
    """And not added when the gradients of thousands of steps later are compressed again."""
    for before in (DiLoCo(every=1), Decentralized(), ByteGrad(hierarchical=False)):
        model, optimizer = _resumable(hvd, 0.02, before)
        _step(everyone, model, optimizer, 0)
        own = copy.deepcopy(optimizer.state_dict()["bagua"])
        model, optimizer = _resumable(hvd, 0.02, Algorithm())
        optimizer.load_state_dict(optimizer.state_dict() | {"bagua": own})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            _step(everyone, model, optimizer, 1)
        had_kept = isinstance(before, DiLoCo)
        assert any("keeps nothing" in str(w.message) for w in told) == had_kept
    model, optimizer = _resumable(hvd, 0.02)
    _step(everyone, model, optimizer, 0)
    own = copy.deepcopy(optimizer.state_dict()["bagua"])
    assert own["kept"]["lost"]
    model, optimizer = _resumable(hvd, 0.02, Algorithm())
    optimizer.load_state_dict(optimizer.state_dict() | {"bagua": own})
    with pytest.warns(UserWarning, match="keeps nothing"):
        _step(everyone, model, optimizer, 1)
    assert "bagua" not in optimizer.state_dict()
    optimizer.set_algorithm(_SIGN1)
    _step(everyone, model, optimizer, 2)
    _assert_equal_replicas(hvd, model)


def test_one_layout_for_all_is_no_reason_to_warn(everyone, hvd, recwarn):
    blocks = ByteGrad(hierarchical=False)
    model, optimizer = _resumable(hvd, 0.02, blocks)
    _step(everyone, model, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    model, optimizer = _resumable(hvd, 0.02, blocks)
    if everyone.me == 0:
        optimizer.load_state_dict(state)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    _step(everyone, model, optimizer, 1)
    _assert_equal_replicas(hvd, model)
    assert not [w for w in recwarn if "begins anew" in str(w.message)]


@pytest.mark.ranks(2, 3, 4)  # one has no other
@pytest.mark.parametrize(
    "how", ["of another size", "of other machines", "of rank 0 alone", "of another step"]
)
def test_a_checkpoint_that_does_not_fit_begins_anew(everyone, hvd, how):
    def change(state):
        kept = state["bagua"]["kept"]
        if how == "of another size":
            kept["identity"]["size"] = everyone.size + 1
            return state
        if how == "of other machines":
            kept["identity"]["machines"] = [0] * (everyone.size + 1)
            return state
        if how == "of another step":
            kept["layout"] = (everyone.me, *kept["layout"][1:])
            return state
        return state | {"bagua": hvd.broadcast_object(state["bagua"], 0)}

    with pytest.warns(UserWarning, match="begins anew"):
        model = _trained(hvd, everyone, 6, 3, change)
    _assert_equal_replicas(hvd, model)


@pytest.mark.parametrize("algorithm", [ByteGrad(hierarchical=False), _SIGN1], ids=repr)
def test_a_rank_without_any_batch_joins(everyone, hvd, algorithm):
    model, optimizer = _resumable(hvd, 0.02, algorithm)
    for step in range(3 if everyone.me == 0 else 0):
        _step(everyone, model, optimizer, step)
    assert hvd.join() == 0
