"""Looks at replicas and gradients, and different algorithms for different parameters."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm, ByteGrad, Exchange, LocalSGD, PerParameter, TopK, find
from bagua.common.kinds import ReduceOp
from bagua.common.world import world
from bagua.torch.own import keep_own

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture
def setting(monkeypatch, hvd):
    def change(**settings):
        monkeypatch.setattr(world(), "config", dataclasses.replace(world().config, **settings))

    return change


def test_replicas_that_differ_are_named(everyone, hvd, setting):
    setting(check_replicas_every=2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        if step == 3 and everyone.me == everyone.size - 1:
            with torch.no_grad():
                model[1].weight += 1e-3
        if step == 3 and everyone.size > 1:
            last = everyone.size - 1
            words = rf"replicas differ: 1\.weight is not the same on ranks? 0.* and rank {last}"
            with pytest.raises(hvd.ReplicasDifferError, match=words):
                optimizer.step()
            break
        optimizer.step()


@pytest.mark.parametrize("forgotten", [True, False])
def test_who_forgets_to_broadcast_hears_of_it_once(everyone, hvd, forgotten):
    torch.manual_seed(everyone.me)
    model = nn.Sequential(nn.LayerNorm(30), nn.Linear(30, 4))
    if not forgotten:
        hvd.broadcast_parameters(model.state_dict(), 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 30)).sum().backward()
            optimizer.step()
    texts = [str(warning.message) for warning in caught]
    if forgotten and everyone.size > 1 and everyone.me == 0:
        (text,) = texts
        assert "1.weight is not the same on rank 0 and rank 1" in text
        assert "nor is 1 more after it" in text
        assert "call broadcast_parameters(" in text
    else:
        assert not texts


@pytest.mark.parametrize("forgotten", [True, False])
def test_who_forgets_to_broadcast_the_state_hears_of_it(everyone, hvd, forgotten):
    """Of what one rank has loaded, or of moments that averages of weights left to each rank."""
    model = nn.Linear(30, 4)
    hvd.broadcast_parameters(model.state_dict(), 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    if everyone.me < 2:
        model(torch.full((1, 30), 1.0 + everyone.me)).sum().backward()
        sgd.step()
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    if not forgotten:
        hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(1, 30)).sum().backward()
    texts = [str(warning.message) for warning in caught]
    if forgotten and everyone.size > 1 and everyone.me == 0:
        (text,) = texts
        words = "replicas differ: the state of weight is not the same on rank 0 and rank 1"
        assert words in text
        assert "broadcast_optimizer_state(" in text
    else:
        assert not texts


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", ["step", "exp_avg", "exp_avg_sq"])
def test_all_that_is_kept_of_a_parameter_is_looked_at(everyone, hvd, what):
    model = nn.Linear(30, 4, bias=False)
    hvd.broadcast_parameters(model.state_dict(), 0)
    adam = torch.optim.Adam(model.parameters(), lr=0.0)
    model(torch.ones(1, 30)).sum().backward()
    adam.step()
    adam.state[model.weight][what].add_(everyone.me)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(1, 30)).sum().backward()
    texts = [str(warning.message) for warning in caught]
    assert any("the state of weight is not the same" in t for t in texts) == (everyone.me == 0)


def test_what_is_frozen_may_differ(everyone, hvd, setting):
    """Nobody exchanges it: it is neither compared nor looked at, whoever has one."""
    setting(check_finite="skip")
    param = nn.Parameter(torch.zeros(5))
    frozen = [
        nn.Parameter(torch.full((3,), float(everyone.me)), requires_grad=False)
        for _ in range(1 + everyone.me)
    ]
    frozen[0].grad = torch.full((3,), torch.nan if everyone.me else 0.0)
    groups = [{"params": [param]}, {"params": frozen, "lr": 0.0}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        param.sum().backward()
        optimizer.step()
    assert (param == -1).all()


def test_a_rank_that_has_joined_is_no_other_replica(everyone, hvd):
    steps = everyone.me > 0 or everyone.size == 1
    param = nn.Parameter(torch.full((5,), 7.0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if steps:
            param.sum().backward()
            optimizer.step()
        hvd.join()
    number = max(1, everyone.size - 1)
    assert (param == 7 - steps * number / everyone.size).all()


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_consensus_distance(everyone, hvd, algorithm):
    params = [
        nn.Parameter(torch.full((5,), 1.0 + everyone.me, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    sgd = torch.optim.SGD(params, lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=algorithm)
    values = np.arange(everyone.size) + 1.0
    assert optimizer.consensus_distance() == pytest.approx(values.std() / values.mean())
    hvd.broadcast_parameters(list(zip("ab", params)), 0)
    assert optimizer.consensus_distance() == 0


def test_replicas_are_compared_at_the_end_of_a_round(everyone, hvd, setting):
    setting(check_replicas_every=2)
    param = nn.Parameter(torch.zeros(5))
    sgd = torch.optim.SGD([param], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, [("w", param)], algorithm=LocalSGD(every=3))
    for step in range(9):
        param.grad = torch.full_like(param, float(everyone.me))  # replicas differ in between
        if step == 8 and everyone.size > 1:
            optimizer._driver._common[0] += everyone.me  # as a defect would
            with pytest.raises(hvd.ReplicasDifferError, match="w is not the same"):
                optimizer.step()
        else:
            optimizer.step()


FORWARD = LocalSGD(every=3, when="forward")


@pytest.mark.parametrize("algorithm", ["decentralized", FORWARD, "local_sgd"])
def test_how_far_apart_replicas_are_is_told(everyone, hvd, setting, capfd, algorithm):
    setting(check_replicas_every=2)
    param = nn.Parameter(torch.ones(5))
    sgd = torch.optim.SGD([param], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, [("w", param)], algorithm=algorithm)
    for _ in range(5):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    told = [line for line in capfd.readouterr().err.splitlines() if "apart" in line]
    drifts = algorithm in ("decentralized", FORWARD) and everyone.me == 0
    steps = [2, 4] if drifts else []
    assert [line.split(" (")[0] for line in told] == [
        f"bagua: after step {step} replicas are 0 apart" for step in steps
    ]


def test_that_nothing_is_compared_is_told_once(everyone, hvd, setting):
    setting(check_replicas_every=2)
    param = nn.Parameter(torch.ones(5))
    sgd = torch.optim.SGD([param], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm="async_model_average")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            param.grad = torch.zeros_like(param)
            optimizer.step()
    told = [str(w.message) for w in caught if "check_replicas_every compares" in str(w.message)]
    assert len(told) == (everyone.me == 0)
    optimizer.settle()


WATCHED = {
    "exact": Algorithm(),
    "fp16": Algorithm(codec="fp16"),
    "minmax_u8": Algorithm(codec="minmax_u8", exact=[]),
    "sign1": Algorithm(codec="sign1", exact=[]),
    "topk": TopK(hierarchical=False, exact=[]),
    "low rank": Algorithm(low_rank=1),
    "mean of machines": Algorithm(hierarchical=True),
    "adasum": Algorithm(op=ReduceOp.Adasum),
}


@pytest.mark.parametrize("wish", ["watch", "off"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("how", list(WATCHED))
def test_what_is_no_number_is_seen_on_its_way(everyone, hvd, setting, how, bad, wish):
    """Without anybody looking for it: some rank that reduces it tells whose it was."""
    setting(check_finite=wish, bucket_mb=1e-5)
    params = [nn.Parameter(torch.zeros(100, 20)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), algorithm=WATCHED[how])
    last = everyone.size - 1
    for step in range(4):
        optimizer.zero_grad()
        loss = sum(param.sum() for param in params)
        if step == 2 and everyone.me == last:
            loss = loss + bad * params[1][3, 4]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss.backward()
            early = [w for w in caught if "NaN or Inf" in str(w.message)]
            optimizer.step()
        assert not early  # a GradScaler may have looked for it
        told = [str(w.message) for w in caught if "NaN or Inf" in str(w.message)]
        everyones = [text for texts in hvd.allgather_object(told) for text in texts]
        seen = step == 2 and everyone.size > 1 and wish == "watch"
        assert bool(everyones) == seen, everyones
        for text in everyones:
            assert "step 2: NaN or Inf in the gradient of parameter.1 (" in text
            by_machines = how == "mean of machines" or everyone.shows_memory
            assert f"of rank {last}. " in text or by_machines


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_named_and_skipped(everyone, hvd, setting, monkeypatch, overlaps, bad):
    setting(check_finite="skip", bucket_mb=1e-5)
    monkeypatch.setattr(world(), "overlaps", lambda busy_threads: overlaps)
    params = [nn.Parameter(torch.zeros(10)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    last = everyone.size - 1
    for step in range(3):
        optimizer.zero_grad()
        scale = bad if step == 1 and everyone.me == last else 1.0
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            (params[0].sum() + scale * params[1].sum()).backward()
        words = [str(warning.message) for warning in w if "NaN or Inf" in str(warning.message)]
        assert bool(words) == (step == 1 and everyone.me == 0)
        if words:
            assert "parameter.1" in words[0]
            assert f"on rank {last}; the step is skipped" in words[0]
        optimizer.step()
    assert (params[0] == -2).all()
    assert (params[1] == -2).all()


@pytest.mark.parametrize("wish", ["skip", "report"])
@pytest.mark.parametrize("codec", ["fp16", "raw"])
def test_what_overflows_in_the_exchange_is_told_too(everyone, hvd, setting, wish, codec):
    setting(check_finite=wish)
    too_large = 1e5 if codec == "fp16" else 3e38
    param = nn.Parameter(torch.zeros(10, 10))
    sgd = torch.optim.SGD([param], lr=1.0)
    op = hvd.Sum if codec == "raw" else hvd.Average
    optimizer = hvd.DistributedOptimizer(sgd, op=op, algorithm=Algorithm(codec=codec))
    for step in range(3):
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            (param.sum() * (too_large if step == 1 else 0.0)).backward()
        words = [str(warning.message) for warning in w if "NaN or Inf" in str(warning.message)]
        overflows = everyone.size > 1 and step == 1
        assert param.grad.isinf().all() == overflows
        assert bool(words) == (overflows and everyone.me == 0)
        if words:
            assert "parameter.0 (" in words[0]
            assert "after the exchange, though not before" in words[0]
            assert ("skipped on all ranks" in words[0]) == (wish == "skip")
        optimizer.step()
    skipped = everyone.size > 1 and wish == "skip"
    expected = 0.0 if skipped else -too_large if everyone.size == 1 else -torch.inf
    assert (param == expected).all()


def test_gradients_that_travel_alone_are_looked_at(everyone, hvd, setting):
    setting(check_finite="skip")
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters()
    )
    hvd.broadcast_parameters(table.state_dict())
    for step in range(4):
        optimizer.zero_grad()
        before = table.weight.detach().clone()
        scale = torch.nan if step == 2 and everyone.me == everyone.size - 1 else 1.0
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            (scale * table(torch.tensor([everyone.me, 9])).sum()).backward()
        words = [str(warning.message) for warning in w if "NaN or Inf" in str(warning.message)]
        assert bool(words) == (step == 2 and everyone.me == 0)
        if words:
            assert f"weight (alone) on rank {everyone.size - 1}" in words[0]
        optimizer.step()
        assert torch.equal(table.weight, before) == (step == 2)


def test_only_reported(everyone, hvd, setting):
    setting(check_finite="report")
    param = nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    (param * torch.nan).sum().backward()
    optimizer.step()
    assert param.isnan().all()


def test_parameters_differ_in_their_algorithm(everyone, hvd):
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(4096, 2), "body": nn.Linear(64, 512), "head": nn.Linear(512, 8)}
    )
    choice = {"embedding.*": "topk", "body.*": Algorithm(codec="minmax_u8")}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), algorithm=choice
    )
    chosen = {slot.name: slot.algorithm for run in optimizer._driver.layout.runs for slot in run}
    assert chosen["embedding.weight"].codec == "topk"
    assert chosen["body.weight"].codec == "minmax_u8"
    assert chosen["head.weight"] == Algorithm()
    for step in range(2):
        optimizer.zero_grad()
        torch.manual_seed(10 * everyone.me + step)
        rows = model["embedding"](torch.randint(4096, (5,)))
        out = model["head"](model["body"](torch.randn(3, 64))).sum() + rows.square().sum()
        out.backward()
        optimizer.step()
    for theirs in hvd.allgather_object([p.grad for p in model.parameters()]):
        assert all(torch.equal(a, p.grad) for a, p in zip(theirs, model.parameters()))


def test_a_function_chooses(hvd):
    param, other = nn.Parameter(torch.zeros(40, 40)), nn.Parameter(torch.zeros(3, 3))
    by_size = lambda name, shape: "bytegrad" if shape[0] > 10 else None  # noqa: E731
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param, other], lr=0.1), algorithm=by_size)
    (param.sum() + other.sum()).backward()
    optimizer.step()
    chosen = [slot.algorithm.codec for b in optimizer._driver.layout.buckets for slot in b.slots]
    assert sorted(chosen) == ["minmax_u8", "raw"]


def test_a_pattern_without_a_parameter_is_told(everyone, hvd):
    model = nn.Linear(3, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    by_name = {"weight": "bytegrad", "embedding.*": "topk", "*.bias": "topk"}
    for algorithm, says in {"all": {"*": "bytegrad"}, "some": by_name}.items():
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=says)
        words = [str(warning.message) for warning in w if "patterns" in str(warning.message)]
        assert len(words) == (algorithm == "some" and everyone.me == 0)
        assert all("no parameter: 'embedding.*', '*.bias'. Names are" in said for said in words)


def test_a_pattern_of_exact_without_a_parameter_is_told(everyone, hvd):
    layer = nn.Linear(3, 40)
    sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
    coded = Algorithm(codec="sign1", exact=["bias", "wieght"])
    for chosen in (coded, {"*": coded}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(sgd, layer.named_parameters(), algorithm=chosen)
        told = [str(w.message) for w in caught if "match no parameter" in str(w.message)]
        assert len(told) == (everyone.me == 0)
        assert all("parameter: 'wieght'. Names" in text for text in told)


def test_what_a_plan_may_not_say(everyone, hvd):
    """Whoever carries it out has been chosen by the algorithm's own fields."""
    param = nn.Parameter(torch.zeros(3, 3))
    sgd = torch.optim.SGD([param], lr=0.1)
    for base, says in ((Algorithm, Exchange(what="weight", when="step")), (LocalSGD, Exchange())):
        mine = type("Mine", (base,), {"plan": lambda *_, says=says: says})
        with pytest.raises(hvd.UsageError, match=f"Mine.plan returned what='{says.what}'"):
            hvd.DistributedOptimizer(sgd, algorithm=mine())
    for method, kind in (("plan", "Exchange"), ("at", "Algorithm"), ("of", "Algorithm")):
        mine = type("Mine", (Algorithm,), {method: lambda *_: None})
        with pytest.raises(hvd.UsageError, match=f"Mine.{method} returned None; .* an {kind}"):
            hvd.DistributedOptimizer(sgd, algorithm=mine())
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == everyone.size


def test_what_is_no_algorithm(hvd):
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(3, 3))], lr=0.1)
    for given in (ByteGrad, {"*": ByteGrad}):
        with pytest.raises(hvd.UsageError, match=r"give an instance: ByteGrad\(\)"):
            hvd.DistributedOptimizer(sgd, algorithm=given)
    for given in (["topk"], 3, int):
        with pytest.raises(hvd.UsageError, match="an algorithm is a name"):
            hvd.DistributedOptimizer(sgd, algorithm=given)
    said = repr(hvd.DistributedOptimizer(sgd, algorithm=ByteGrad(hierarchical=False)))
    assert said == f"Distributed{sgd!r} by ByteGrad(hierarchical=False)"


def test_weights_of_some_parameters_only_are_refused(hvd):
    with pytest.raises(hvd.UsageError, match="an optimizer of their own"):
        PerParameter({"*": "decentralized"})
    with pytest.raises(hvd.UsageError, match="did you mean 'topk'"):
        PerParameter({"*": "topkk"})


@pytest.mark.parametrize("check", ["finite", "replicas"])
def test_looks_do_without_a_rank_that_has_joined(everyone, hvd, setting, check):
    if check == "finite":
        setting(check_finite="report")
    else:
        setting(check_replicas_every=1)
    param = nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    for _ in range(2 if everyone.me == 0 else 4):
        optimizer.zero_grad()
        param.sum().backward()
        optimizer.step()
    hvd.join()


@pytest.mark.filterwarnings("ignore:.*NaN or Inf")
def test_a_step_with_a_closure_is_not_taken(everyone, hvd, setting):
    setting(check_finite="skip")
    param = nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))

    def closure():
        optimizer.zero_grad()
        loss = (param * torch.nan).sum()
        loss.backward()
        return loss

    with pytest.raises(hvd.UsageError, match="closure"):
        optimizer.step(closure)
    assert (param == 0).all()


BETWEEN = ["decentralized", "low_precision_decentralized", "async_model_average", "local_sgd"]


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("how", ["check_finite", "scaler", "both"])
def test_a_rank_whose_gradients_are_no_numbers_keeps_its_weights(everyone, hvd, setting, name, how):
    """And goes on with the others, which step."""
    setting(check_finite="off" if how == "scaler" else "skip")
    kinds = {"async_model_average": {"sync_interval_ms": 1}, "local_sgd": {"every": 2}}
    algorithm = dataclasses.replace(find(name), warmup_steps=0, **kinds.get(name, {}))
    param = nn.Parameter(torch.zeros(10))
    sgd = torch.optim.SGD([param], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, [("w", param)], algorithm=algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=how != "check_finite")
    for step in range(6):
        optimizer.zero_grad()
        bad = step == 3 and everyone.me == everyone.size - 1
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            scaler.scale(param.sum() * (torch.inf if bad else 1.0)).backward()
            scaler.step(optimizer)
        words = [str(warning.message) for warning in w if "NaN or Inf" in str(warning.message)]
        assert bool(words) == (bad and how != "scaler")
        assert all(f"w on rank {everyone.me}; this rank keeps" in said for said in words)
        scaler.update()
    if how != "check_finite" and everyone.size > 1:
        with pytest.raises(hvd.UsageError, match="make a new GradScaler on every rank"):
            optimizer.set_algorithm("gradient_allreduce")
    optimizer.settle()
    # Every rank has stepped six times, the last one five times.
    torch.testing.assert_close(param.detach(), torch.full((10,), 1 / everyone.size - 6.0))


@pytest.mark.parametrize("name", ["gradient_allreduce", "powersgd", "decentralized", "local_sgd"])
def test_what_does_not_travel_is_looked_at(everyone, hvd, setting, name):
    """Where gradients travel no rank steps, elsewhere only others do."""
    setting(check_finite="skip")
    params = [nn.Parameter(torch.full((n,), float(everyone.me))) for n in (12, 10, 7)]
    keep_own([params[1]])
    before = params[1].detach().clone()
    sgd = torch.optim.SGD(params, lr=1.0)
    optimizer = hvd.DistributedOptimizer(
        sgd, [("a", params[0]), ("own", params[1]), ("b", params[2])], algorithm=name
    )
    last = everyone.size - 1
    for step in range(3):
        optimizer.zero_grad()
        scale = torch.nan if step == 1 and everyone.me == last else 1.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (params[0].sum() + scale * params[1].sum() + params[2].sum()).backward()
            optimizer.step()
        caught = [each for each in caught if "NaN or Inf" in str(each.message)]
        assert {each.filename for each in caught} <= {__file__}, "the user's line"
        words = [str(each.message) for each in caught]
        travel = name in ("gradient_allreduce", "powersgd")
        assert bool(words) == (step == 1 and everyone.me == (0 if travel else last))
        assert all(f"own on rank {last}" in said.replace(" (own)", "") for said in words)
    skips = travel or everyone.me == last
    assert torch.equal(params[1], before - (2 if skips else 3))
    assert all(param.isfinite().all() for param in params)


def test_what_is_exact_on_one_machine_is_said(everyone, hvd):
    param = nn.Parameter(torch.zeros(5000, 2))
    sgd = torch.optim.SGD([param], lr=1.0)
    for algorithm, says in {
        "bytegrad": True,
        "gradient_allreduce": False,
        "local_sgd": False,
    }.items():
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(sgd, algorithm=algorithm)
        w = [warning for warning in w if "share a machine" in str(warning.message)]
        assert {warning.filename for warning in w} <= {__file__}, "the user's line"
        words = [str(warning.message) for warning in w]
        assert bool(words) == (says and everyone.size > 1 and everyone.me == 0)
        remedy = "hierarchical=False, or bagua-run --transport mpi, takes them here, too"
        assert all("bytegrad is an exact average" in said and remedy in said for said in words)
    with pytest.raises(hvd.UsageError, match=r"'sign1' is a codec, .*ByteGrad\(codec='sign1'\)"):
        hvd.DistributedOptimizer(sgd, algorithm="sign1")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("wish", ["report", "skip"])
@pytest.mark.parametrize("pass_of_rank_1", ["in another order", "with one of them"])
def test_two_optimizers_in_a_pass(everyone, hvd, setting, wish, pass_of_rank_1):
    setting(check_finite=wish)
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters())
        for m in models
    ]
    for step in range(4):
        used = models
        if everyone.me == 1 and step > 0:
            used = models[::-1] if pass_of_rank_1 == "in another order" else models[1:]
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(model(torch.ones(2, 3)).sum() for model in used).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model in models:
        for theirs in hvd.allgather_object(model.weight.grad):
            assert torch.equal(theirs, model.weight.grad)
