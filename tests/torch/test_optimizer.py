"""DistributedOptimizer against an oracle: one process that trains on everyone's batches."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from typing import Any

import pytest
import torch
from torch import nn

from bagua.algorithms import Decentralized, DiLoCo, LocalSGD, TopK

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usefixtures("overlap")]

BATCH = 4


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(everyone, steps: int, seed: int = 0):
    """Per step everyone's inputs and targets, one below the other."""
    generator = torch.Generator().manual_seed(seed)
    rows = BATCH * everyone.size
    for _ in range(steps):
        yield (
            torch.randn(rows, 6, generator=generator),
            torch.randn(rows, 3, generator=generator),
        )


def mine(everyone, rows: torch.Tensor) -> torch.Tensor:
    return rows[everyone.me * BATCH : (everyone.me + 1) * BATCH]


def loss_of(model, inputs, targets):
    return (model(inputs) - targets).square().mean()


def assert_same_everywhere(hvd, model) -> None:
    for parameters in hvd.allgather_object([p.detach() for p in model.parameters()]):
        for theirs, ours in zip(parameters, model.parameters()):
            assert torch.equal(theirs, ours)


def assert_close(model, oracle, tolerance: float = 1e-5) -> None:
    for ours, right in zip(model.parameters(), oracle.parameters()):
        torch.testing.assert_close(ours, right, rtol=tolerance, atol=tolerance)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_all_sizes(everyone, hvd, set_to_none):
    """Some are copied into an arena, some are exchanged where they are."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 40000), nn.Tanh(), nn.Linear(40000, 3))

    model, oracle = make(), make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), backward_passes_per_step=2
    )
    reference = torch.optim.SGD(oracle.parameters(), lr=1e-4, momentum=0.9)
    for number, (inputs, targets) in enumerate(batches(everyone, 6)):
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        loss_of(oracle, inputs, targets).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            reference.step()
            reference.zero_grad()
    assert_close(model, oracle, 1e-4)
    assert_same_everywhere(hvd, model)


def test_torch_that_does_not_count_owners(everyone, hvd, monkeypatch):
    """Then large gradients are copied like others."""
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    param = nn.Parameter(torch.zeros(200000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        (param * (everyone.me + 1)).sum().backward()
        optimizer.step()
    right = -2.0 * sum(range(1, everyone.size + 1))
    assert torch.equal(param, torch.full_like(param, right))


@pytest.mark.parametrize("width", [3, 200000])
def test_two_optimizers_of_one_parameter(everyone, hvd, width):
    param = nn.Parameter(torch.zeros(width))
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0)) for _ in range(2)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
            (param * (everyone.me + 1)).sum().backward()
            optimizer.step()
    mean = (everyone.size + 1) / 2
    assert torch.allclose(param, torch.full_like(param, -6 * mean))


def test_two_optimizers_of_one_parameter_by_unlike_exchanges(hvd):
    param = nn.Parameter(torch.zeros(3))
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), op=op)
        for op in (hvd.Sum, hvd.Average)
    ]
    for _ in range(2):
        with pytest.raises(
            hvd.UsageError, match=r"two optimizers exchange .*: Sum .*, and Average "
        ):
            param.sum().backward()
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_a_rank_that_needs_only_one_of_two_models(everyone, hvd):
    """Whatever a backward pass reaches is launched before anything is waited for."""
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(6, 6), nn.Linear(6, 3)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for model in (encoder, decoder)
    ]
    for step in range(4):
        hidden = encoder(torch.ones(2, 6))
        # In the first step the ranks agree on orders, one optimizer after the other.
        output = hidden if step > 0 and everyone.me == 0 else decoder(hidden)
        output.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_everywhere(hvd, encoder)
    assert_same_everywhere(hvd, decoder)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_equals_training_on_all_batches(everyone, hvd, kind):
    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()), model.named_parameters()
    )
    reference = OPTIMIZERS[kind](oracle.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, reference)]
    for inputs, targets in batches(everyone, 6):
        optimizer.zero_grad()
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        reference.zero_grad()
        loss_of(oracle, inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        reference.step()
        for schedule in schedules:
            schedule.step()
        assert_close(model, oracle)
    assert_same_everywhere(hvd, model)
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]


def test_is_the_wrapped_optimizer(hvd):
    model = mlp()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, torch.ones(2, 6), torch.zeros(2, 3)).backward()
    inner.step()
    before = copy.deepcopy(inner.state_dict())
    optimizer = hvd.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults == inner.defaults
    assert str(optimizer.state_dict()) == str(before)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.step()
    assert calls == ["post"]
    optimizer.load_state_dict(before)
    assert str(inner.state_dict()) == str(before)
    with pytest.raises(hvd.UsageError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(hvd.UsageError, match="state_dict"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(everyone, hvd, set_to_none):
    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for inputs, targets in batches(everyone, 3):
        for network, which, rows in (
            (model, optimizer, (mine(everyone, inputs), mine(everyone, targets))),
            (oracle, reference, (inputs, targets)),
        ):
            which.zero_grad(set_to_none=set_to_none)
            grads = [p.grad for p in network.parameters()]
            assert all((g is None) if set_to_none else (g is None or not g.any()) for g in grads)
            loss_of(network, *rows).backward()
            which.step()
    assert_close(model, oracle)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_closure(everyone, hvd, search):
    """How often it is called depends on the loss, which must be everybody's then."""
    model, oracle = mlp().double(), mlp().double()
    settings = {"lr": 0.1, "max_iter": 12, "history_size": 2, "line_search_fn": search}
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **settings))
    reference = torch.optim.LBFGS(oracle.parameters(), **settings)
    for rows in batches(everyone, 4):
        inputs, targets = (each.double() for each in rows)

        def closure(network, which, rows):
            which.zero_grad()
            loss = loss_of(network, *rows)
            loss.backward()
            return loss

        ours = (mine(everyone, inputs), mine(everyone, targets))
        loss = optimizer.step(lambda: closure(model, optimizer, ours))  # noqa: B023
        right = reference.step(lambda: closure(oracle, reference, (inputs, targets)))  # noqa: B023
        torch.testing.assert_close(loss, right)
    assert_same_everywhere(hvd, model)
    assert_close(model, oracle)


def test_grad_scaler(everyone, hvd):
    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step, (inputs, targets) in enumerate(batches(everyone, 3)):
        optimizer.zero_grad()
        loss = loss_of(model, mine(everyone, inputs), mine(everyone, targets))
        if step == 1 and everyone.me == everyone.size - 1:
            loss = loss * float("inf")  # overflow on one rank: all must skip this step
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            continue
        reference.zero_grad()
        loss_of(oracle, inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        reference.step()
    assert scaler.get_scale() == 512.0
    assert_close(model, oracle)


@pytest.mark.parametrize("how", ["passes", "no_sync"])
def test_gradient_accumulation(everyone, hvd, how):
    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        backward_passes_per_step=3 if how == "passes" else 1,
    )
    reference = torch.optim.SGD(oracle.parameters(), lr=0.05)
    exchanged = []
    for number, (inputs, targets) in enumerate(batches(everyone, 6)):
        before = hvd.counters()["exchanges"]
        rows = (mine(everyone, inputs), mine(everyone, targets))
        if how == "no_sync" and number % 3 != 2:
            with hvd.no_sync(optimizer):
                loss_of(model, *rows).backward()
        else:
            loss_of(model, *rows).backward()
        exchanged.append(hvd.counters()["exchanges"] > before)
        loss_of(oracle, inputs, targets).backward()
        if number % 3 == 2:
            for which in (optimizer, reference):
                which.step()
                which.zero_grad()
    assert exchanged == [False, False, True] * 2
    assert_close(model, oracle)


def test_leftover_of_an_accumulation_window(everyone, hvd):
    """step() before the window is full exchanges what there is."""
    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), backward_passes_per_step=4
    )
    reference = torch.optim.SGD(oracle.parameters(), lr=0.05)
    for number, (inputs, targets) in enumerate(batches(everyone, 5)):
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        loss_of(oracle, inputs, targets).backward()
        if number in (1, 4):
            for which in (optimizer, reference):
                which.step()
                which.zero_grad()
            assert_close(model, oracle)
    assert_same_everywhere(hvd, model)


def test_two_backwards_before_a_step(everyone, hvd):
    """Averaging what is averaged already changes nothing, so losses may be added up."""
    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.05)
    for inputs, targets in batches(everyone, 4):
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        model(mine(everyone, inputs)).abs().mean().backward()
        loss_of(oracle, inputs, targets).backward()
        oracle(inputs).abs().mean().backward()
        for which in (optimizer, reference):
            which.step()
            which.zero_grad()
    assert_close(model, oracle)


def test_two_backwards_with_sum_are_refused(everyone, hvd):
    model = mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), op=hvd.Sum)
    rows = torch.ones(2, 6)
    model(rows).sum().backward()
    with pytest.raises(hvd.UsageError, match="backward_passes_per_step"):
        model(rows).sum().backward()
    optimizer.zero_grad()
    model(rows).sum().backward()
    optimizer.step()
    assert_same_everywhere(hvd, model)


class Branches(nn.Module):
    """Which branch is used is up to the rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(5))

    def forward(self, rows, which):
        return self.branches[which](rows)


def test_ranks_use_different_parameters(everyone, hvd):
    model, oracle = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for inputs, _ in batches(everyone, 3):
        optimizer.zero_grad()
        model(mine(everyone, inputs), everyone.me).square().mean().backward()
        optimizer.step()
        reference.zero_grad()
        for rank in everyone.ranks:
            rows = inputs[rank * BATCH : (rank + 1) * BATCH]
            (oracle(rows, rank).square().mean() / everyone.size).backward()
        reference.step()
    assert_close(model, oracle)
    unused = model.branches[4].weight
    assert unused.grad is not None
    assert not unused.grad.any()


def test_a_rank_without_backward_takes_part(everyone, hvd):
    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = next(iter(batches(everyone, 1)))
    idle = everyone.size - 1
    if everyone.me != idle or everyone.size == 1:
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
    optimizer.step()
    busy = max(everyone.size - 1, 1)
    loss = loss_of(oracle, inputs[: busy * BATCH], targets[: busy * BATCH])
    (loss * busy / everyone.size).backward()
    torch.optim.SGD(oracle.parameters(), lr=0.1).step()
    assert_close(model, oracle)


def test_frozen_thawed_and_added_parameters(everyone, hvd):
    model, oracle = mlp(), mlp()
    head, oracle_head = nn.Linear(3, 3), nn.Linear(3, 3)
    oracle_head.load_state_dict(head.state_dict())
    hvd.broadcast_parameters(head.state_dict(), 0)
    hvd.broadcast_parameters(oracle_head.state_dict(), 0)
    model[0].requires_grad_(False)
    oracle[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for step, (inputs, targets) in enumerate(batches(everyone, 8)):
        if step == 2:
            model[0].requires_grad_(True)
            oracle[0].requires_grad_(True)
        if step == 4:
            optimizer.add_param_group({"params": head.parameters(), "lr": 0.01})
            reference.add_param_group({"params": oracle_head.parameters(), "lr": 0.01})
        if step == 6:
            model[2].requires_grad_(False)
            oracle[2].requires_grad_(False)
        for network, top, which, rows in (
            (model, head, optimizer, (mine(everyone, inputs), mine(everyone, targets))),
            (oracle, oracle_head, reference, (inputs, targets)),
        ):
            # Thawed between zero_grad and backward, so that nothing can notice before step.
            which.zero_grad()
            out = top(network(rows[0])) if step >= 4 else network(rows[0])
            (out - rows[1]).square().mean().backward()
            which.step()
        assert_close(model, oracle)
        assert_close(head, oracle_head)
    assert_same_everywhere(hvd, model)


@pytest.mark.ranks(2)
def test_names_of_buckets_come_round(hvd):
    """The engine remembers them, and some freeze and thaw in every step."""
    model = mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    names = []
    for step in range(20):
        model[0].requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        names.append({bucket.name for bucket in optimizer._driver.layout.buckets})
    assert all(not before & after for before, after in zip(names, names[1:]))
    assert len(set.union(*names)) < 20


def test_frozen_between_steps_is_not_stepped(hvd):
    """The optimizer's own zero_grad, in which freezing could be noticed in time, is not called."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    for step in range(5):
        if step == 2:
            model[0].requires_grad_(False)
            frozen = model[0].weight.clone()
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert torch.equal(model[0].weight, frozen)
    assert model[0].weight.grad is None


def test_wrapped_anew_while_one_rank_keeps_the_wrapper_before(everyone, hvd):
    """As an exception does that a script keeps."""
    model, oracle = mlp(), mlp()
    hvd.broadcast_parameters(model.state_dict(), 0)
    oracle.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd)
    kept = []
    for step, (inputs, targets) in enumerate(batches(everyone, 5)):
        if step == 3:
            kept += [optimizer] if everyone.me == 0 else []
            optimizer = hvd.DistributedOptimizer(sgd)
            gc.collect()
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        loss_of(oracle, inputs, targets).backward()
        optimizer.step()
        reference.step()
    assert_close(model, oracle)
    assert_same_everywhere(hvd, model)
    for before in kept:
        with pytest.raises(hvd.UsageError, match="wrapped the same optimizer anew"):
            before.step()


def test_the_order_is_asked_for_again_after_an_error(everyone, hvd, monkeypatch):
    model = mlp()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    layout = optimizer._driver.layout
    steps = iter(batches(everyone, 3))

    def step() -> None:
        inputs, targets = next(steps)
        optimizer.zero_grad()
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        optimizer.step()

    def differs(what: str, values: Any, op: Any) -> Any:
        raise hvd.UsageError("ranks disagree")

    with monkeypatch.context() as patch:
        agreed = layout._agreed
        patch.setattr(
            layout, "_agreed", lambda what, *a: (differs if what == "order" else agreed)(what, *a)
        )
        with pytest.raises(hvd.UsageError, match="disagree"):
            step()
    assert not layout.settled
    step()
    assert layout.settled
    step()
    assert_same_everywhere(hvd, model)


@pytest.mark.parametrize("algorithm", [LocalSGD(every=2, warmup_steps=3), TopK(warmup_steps=3)])
def test_a_group_that_is_added_has_names_for_every_algorithm(everyone, hvd, algorithm):
    """Though `named_parameters` had none."""
    model, head = mlp(), nn.Linear(3, 3)
    for part in (model, head):
        hvd.broadcast_parameters(part.state_dict(), 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    optimizer.add_param_group({"params": head.parameters()})
    for step, (inputs, targets) in enumerate(batches(everyone, 8)):
        if step == 6:
            optimizer.set_algorithm("gradient_allreduce")
        optimizer.zero_grad()
        outputs = head(model(mine(everyone, inputs)))
        (outputs - mine(everyone, targets)).square().mean().backward()
        optimizer.step()
    assert_same_everywhere(hvd, model)
    assert_same_everywhere(hvd, head)


@pytest.mark.parametrize("how", ["no_sync", "passes", "shared", "local_sgd", "decentralized"])
def test_frozen_with_a_gradient_is_stepped_by_everybodys_only(everyone, hvd, how):
    model = mlp()
    hvd.broadcast_parameters(model.state_dict(), 0)
    weights_travel = how in ("local_sgd", "decentralized")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        backward_passes_per_step=2 if how == "passes" else 1,
        algorithm=LocalSGD(every=1) if how == "local_sgd" else how if weights_travel else None,
    )
    accumulates = optimizer.no_sync() if how == "no_sync" else contextlib.nullcontext()
    rows = [(mine(everyone, x), mine(everyone, y)) for x, y in batches(everyone, 4)]
    for step, (inputs, targets) in enumerate(rows):
        optimizer.zero_grad()
        with accumulates if step == 1 else contextlib.nullcontext():
            loss_of(model, inputs, targets).backward()
        if step == 1:
            before = model[0].weight.detach().clone()
            model[0].weight.requires_grad_(False)
        if how in ("no_sync", "passes"):
            loss_of(model, inputs, targets).backward()
        optimizer.step()
        if step == 1 and not weights_travel:
            assert torch.equal(model[0].weight, before) == (how != "shared")
    optimizer.settle()
    assert_same_everywhere(hvd, model)


def test_thawed_after_zero_grad(everyone, hvd):
    model, oracle = mlp(), mlp()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    inputs, targets = next(iter(batches(everyone, 1)))
    optimizer.zero_grad()
    model[0].requires_grad_(True)
    loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
    optimizer.step()
    loss_of(oracle, inputs, targets).backward()
    reference.step()
    assert_close(model, oracle)


def test_thawed_after_zero_grad_where_gradients_are_summed(everyone, hvd):
    always, thawed = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([always, thawed], lr=1.0), op=hvd.Sum)
    optimizer.zero_grad()
    thawed.requires_grad_(True)
    (always.sum() + (thawed.sum() if everyone.me == 0 else 0)).backward()
    optimizer.step()
    assert (always == -everyone.size).all()
    assert (thawed == -1).all()


def test_thawed_after_backward_where_sums_would_be_summed_again(everyone, hvd):
    always, thawed = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([always, thawed], lr=1.0), op=hvd.Sum)
    optimizer.zero_grad()
    always.sum().backward()
    thawed.requires_grad_(True)
    if everyone.me == 0:
        thawed.grad = torch.ones(5)
    with pytest.raises(hvd.UsageError, match=r"thawed or added between zero_grad\(\) and step\(\)"):
        optimizer.step()
    for step in range(2):
        optimizer.zero_grad()
        (always.sum() + thawed.sum()).backward()
        optimizer.step()
        assert (always == -everyone.size * (step + 1)).all()
        assert (thawed == -everyone.size * (step + 1)).all()


def test_thawed_after_zero_grad_and_used_by_one_rank(everyone, hvd):
    """All exchange it, or the others would be a step ahead from then on."""
    always, thawed = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([always, thawed], lr=1.0))
    for step in range(4):
        optimizer.zero_grad()
        thawed.requires_grad_(step > 0)
        loss = always.sum() * (step + 1)
        if step > 0 and (step > 1 or everyone.me == 0):
            loss = loss + thawed.sum() * (everyone.me + 1)
        loss.backward()
        optimizer.step()
        assert (always.grad == step + 1).all()
    mean = (everyone.size + 1) / 2
    assert torch.allclose(thawed, torch.tensor(-1 / everyone.size - 2 * mean))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, rows):
        return self.second(torch.tanh(self.first(rows)))


def test_tied_weights(everyone, hvd):
    model, oracle = Tied(), Tied()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for inputs, _ in batches(everyone, 3):
        for network, which, rows in (
            (model, optimizer, mine(everyone, inputs)),
            (oracle, reference, inputs),
        ):
            which.zero_grad()
            network(rows).square().mean().backward()
            which.step()
    assert_close(model, oracle)


def test_two_optimizers_that_see_each_others_gradients(everyone, hvd):
    """A GAN: the generator's loss sends gradients through the discriminator too."""

    def nets():
        torch.manual_seed(1)
        return nn.Linear(6, 6), nn.Linear(6, 1)

    def train(generator, discriminator, of_generator, of_discriminator, rows):
        of_discriminator.zero_grad()
        fake = generator(rows).detach()
        (discriminator(fake).square().mean() - discriminator(rows).mean()).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        discriminator(generator(rows)).mean().backward()
        of_generator.step()

    ours, right = nets(), nets()
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in ours
    ]
    references = [torch.optim.SGD(net.parameters(), lr=0.1) for net in right]
    for inputs, _ in batches(everyone, 4):
        train(*ours, *optimizers, mine(everyone, inputs))
        train(*right, *references, inputs)
    for net, oracle in zip(ours, right):
        assert_close(net, oracle)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 6, sparse=True)
        self.unused = nn.Embedding(4, 2, sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.words(ids))


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("learn", [False, True])
def test_sparse_embeddings(everyone, hvd, as_dense, learn):
    model, oracle = Words(), Words()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        sparse_as_dense=as_dense,
    )
    if not learn:
        optimizer._driver.layout.order = None
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        ids = torch.randint(0, 20, (BATCH * everyone.size,), generator=generator)
        for network, which, rows in (
            (model, optimizer, mine(everyone, ids)),
            (oracle, reference, ids),
        ):
            which.zero_grad()
            network(rows).square().mean().backward()
            which.step()
        assert_close(model, oracle)
    assert model.words.weight.grad.is_sparse is not as_dense
    assert_same_everywhere(hvd, model)


@pytest.mark.parametrize("learn", [False, True])
def test_a_bucket_that_sparse_gradients_complete(everyone, hvd, learn):
    """It leaves in the middle of backward, with all of them."""
    table = nn.Embedding(10, 4, sparse=True)
    hvd.broadcast_parameters(table.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Sum, sparse_as_dense=True
    )
    if not learn:
        optimizer._driver.layout.order = None
    before = table.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([everyone.me, 9])).sum().backward()
        optimizer.step()
    moved = torch.zeros(10, 1)
    moved[: everyone.size] = 3
    moved[9] = 3 * everyone.size
    assert torch.allclose(before - table.weight, moved.expand(10, 4))


def test_mixed_dtypes_and_layouts(everyone, hvd):
    def net():
        torch.manual_seed(0)
        return nn.ModuleDict(
            {
                "conv": nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
                "low": nn.Linear(16, 5).to(torch.bfloat16),
                "high": nn.Linear(5, 2).double(),
            }
        )

    def run(model, rows):
        hidden = model["conv"](rows.to(memory_format=torch.channels_last)).flatten(1)[:, :16]
        return model["high"](model["low"](hidden.bfloat16()).double()).square().mean()

    model, oracle = net(), net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        rows = torch.randn(BATCH * everyone.size, 3, 6, 6, generator=generator)
        for network, which, part in (
            (model, optimizer, mine(everyone, rows)),
            (oracle, reference, rows),
        ):
            which.zero_grad()
            run(network, part).backward()
            which.step()
    assert_close(model["high"], oracle["high"], 1e-2)
    assert_close(model["conv"], oracle["conv"], 2e-2)
    assert_same_everywhere(hvd, model)
    weight = model["conv"].weight
    assert weight.grad.stride() == weight.stride()


def test_compiled_model(everyone, hvd):
    model, oracle = mlp(), mlp()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for inputs, targets in batches(everyone, 2):
        optimizer.zero_grad()
        loss_of(compiled, mine(everyone, inputs), mine(everyone, targets)).backward()
        optimizer.step()
        reference.zero_grad()
        loss_of(oracle, inputs, targets).backward()
        reference.step()
    assert_close(model, oracle)


def test_reentrant_checkpoint_of_a_shared_layer(everyone, hvd):
    """A parameter's gradient may come in several parts of one backward."""
    from torch.utils.checkpoint import checkpoint

    def run(model, rows, again):
        rows = rows.clone().requires_grad_(True)
        hidden = again(model[0], rows)
        return again(model[0], hidden[:, :6]).square().mean()

    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for inputs, _ in batches(everyone, 3):
        optimizer.zero_grad()
        part = mine(everyone, inputs)
        run(model, part, lambda layer, x: checkpoint(layer, x, use_reentrant=True)).backward()
        optimizer.step()
        reference.zero_grad()
        run(oracle, inputs, lambda layer, x: layer(x)).backward()
        reference.step()
    assert_close(model, oracle)


@pytest.mark.parametrize("wish", ["num_groups", "groups", "tiny buckets"])
def test_grouping(everyone, hvd, wish, monkeypatch):
    model, oracle = mlp(), mlp()
    keywords = {
        "num_groups": {"num_groups": 2},
        "groups": {"groups": [list(model[0].parameters()), list(model[2].parameters())]},
        "tiny buckets": {},
    }[wish]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **keywords)
    if wish == "tiny buckets":
        optimizer._driver._plan.bucket_nbytes = 100
        optimizer._driver.layout.rebuild([list(optimizer._driver.layout.slots.values())])
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for inputs, targets in batches(everyone, 3):
        optimizer.zero_grad()
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        optimizer.step()
        reference.zero_grad()
        loss_of(oracle, inputs, targets).backward()
        reference.step()
    assert_close(model, oracle)
    count = len(optimizer._driver.layout.buckets)
    assert count > 2 if wish == "tiny buckets" else count == 2


def test_bucket_order_is_learned(everyone, hvd):
    """Registered first, used first: its gradient comes last. The oracle is the order of use."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

        def forward(self, rows):
            return self.last(self.first(rows))

    torch.manual_seed(0)
    model = Backwards()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )

    optimizer._driver._plan.bucket_nbytes = 100  # one bucket per parameter
    optimizer._driver.layout.rebuild([list(optimizer._driver.layout.slots.values())])

    def order():
        return [slot.name for bucket in optimizer._driver.layout.buckets for slot in bucket.slots]

    assert order() == ["first.weight", "last.weight"]
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert order() == ["last.weight", "first.weight"]
    expected = model.last.weight.grad.clone()
    optimizer.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    assert expected.shape == model.last.weight.grad.shape
    assert_same_everywhere(hvd, model)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_cast_compression(everyone, hvd, wire):
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=getattr(hvd.Compression, wire)
    )
    dtype = hvd.Compression.fp16.wire_dtype if wire == "fp16" else torch.bfloat16
    inputs, targets = next(iter(batches(everyone, 1)))
    sums = {}  # by machine, which are rounded where one has several ranks
    machines = hvd.allgather(torch.tensor([hvd.cross_rank()])).tolist()
    for rank, machine in enumerate(machines):
        oracle = mlp()
        rows = slice(rank * BATCH, (rank + 1) * BATCH)
        loss_of(oracle, inputs[rows], targets[rows]).backward()
        sent = [p.grad.to(dtype).float() for p in oracle.parameters()]
        sums[machine] = [a + b for a, b in zip(sums[machine], sent)] if machine in sums else sent
    if len(sums) > 1:
        sums = {i: [part.to(dtype).float() for part in parts] for i, parts in sums.items()}
    loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
    for ours, *parts in zip(model.parameters(), *sums.values()):
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad, (sum(parts) / everyone.size).to(dtype).float())
    optimizer.step()
    assert_same_everywhere(hvd, model)


def test_custom_compressor(everyone, hvd):
    class Halves(hvd.Compressor):
        @staticmethod
        def compress(tensor):
            return tensor * 0.5, tensor.shape

        @staticmethod
        def decompress(tensor, ctx):
            assert tensor.shape == ctx
            return tensor * 2

    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=Halves
    )
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for inputs, targets in batches(everyone, 2):
        optimizer.zero_grad()
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        optimizer.step()
        reference.zero_grad()
        loss_of(oracle, inputs, targets).backward()
        reference.step()
    assert_close(model, oracle)
    assert optimizer._driver.layout.buckets == []


@pytest.mark.parametrize("op", ["Sum", "Max", "Min", "Adasum"])
def test_other_reductions(everyone, hvd, op):
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), op=getattr(hvd, op)
    )
    inputs, targets = next(iter(batches(everyone, 1)))
    grads = []
    for rank in everyone.ranks:
        oracle = mlp()
        rows = slice(rank * BATCH, (rank + 1) * BATCH)
        loss_of(oracle, inputs[rows], targets[rows]).backward()
        grads.append([p.grad for p in oracle.parameters()])
    loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
    for index, ours in enumerate(model.parameters()):
        each = [rank_grads[index] for rank_grads in grads]
        if op == "Adasum":
            expected = adasum(each)
        else:
            stack = torch.stack(each)
            expected = {"Sum": stack.sum, "Max": stack.amax, "Min": stack.amin}[op](0)
        torch.testing.assert_close(ours.grad, expected, rtol=1e-5, atol=1e-6)
    optimizer.step()
    assert_same_everywhere(hvd, model)


def adasum(grads):
    """Pairwise up a tree; ranks past the largest power of two fold in first."""
    power = 1 << (len(grads).bit_length() - 1)
    level = [
        merge(grads[i], grads[i + power]) if i + power < len(grads) else grads[i]
        for i in range(power)
    ]
    while len(level) > 1:
        # Partners at distance 1 first: neighbours.
        level = [merge(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def merge(a, b):
    a, b = a.double(), b.double()
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - dot / (2 * aa) if aa > 0 else 1.0
    right = 1 - dot / (2 * bb) if bb > 0 else 1.0
    return (left * a + right * b).float()


def test_predivide_factor(everyone, hvd):
    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), gradient_predivide_factor=4.0
    )
    inputs, targets = next(iter(batches(everyone, 1)))
    loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
    loss_of(oracle, inputs, targets).backward()
    for ours, right in zip(model.parameters(), oracle.parameters()):
        torch.testing.assert_close(ours.grad, right.grad, rtol=1e-5, atol=1e-6)
    optimizer.step()
    with pytest.raises(hvd.UsageError, match="predivide"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(mlp().parameters(), lr=0.1),
            gradient_predivide_factor=2.0,
            op=hvd.Sum,
        )


@pytest.mark.ranks(2, 3, 4)  # one has no smaller set
def test_process_set(everyone, hvd):
    members = [rank for rank in everyone.ranks if rank != 1]
    process_set = hvd.add_process_set(members)
    try:
        if everyone.me in members:
            model, oracle = mlp(), mlp()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), process_set=process_set
            )
            inputs, targets = next(iter(batches(everyone, 1)))
            loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
            for rank in members:
                rows = slice(rank * BATCH, (rank + 1) * BATCH)
                (loss_of(oracle, inputs[rows], targets[rows]) / len(members)).backward()
            assert optimizer.param_groups[0]["lr"] == 0.1
            for ours, right in zip(model.parameters(), oracle.parameters()):
                torch.testing.assert_close(ours.grad, right.grad, rtol=1e-5, atol=1e-6)
    finally:
        hvd.remove_process_set(process_set)


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, seconds):
        ctx.seconds = seconds
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


@pytest.mark.usefixtures("overlap")
def test_a_gradient_that_is_kept_and_of_two_optimizers(everyone, hvd):
    """It lies where one of them exchanges it; the other must not read it there meanwhile."""
    shared, a, b, c = (nn.Parameter(torch.zeros(5)) for _ in range(4))
    first = hvd.DistributedOptimizer(torch.optim.SGD([shared, a, c], lr=0.0))
    second = hvd.DistributedOptimizer(torch.optim.SGD([shared, b], lr=0.0))
    for step in range(4):
        early = Sleeps.apply(a, 0.06 if everyone.me == 0 else 0.0).sum()
        late = Sleeps.apply(shared, 0.03 if everyone.me == 1 else 0.0).sum()
        loss = early + late * (everyone.me + 1) * (step + 1) + b.sum()
        (loss + c.sum() if step % 2 == 0 else loss).backward()
        assert (shared.grad == (step + 1) * (everyone.size + 1) / 2).all()
        for optimizer in (first, second):
            optimizer.step()
        for optimizer in (first, second):
            optimizer.zero_grad(set_to_none=False)


def test_bad_names(hvd):
    model = mlp()
    params = list(model.parameters())
    sgd = torch.optim.SGD(params, lr=0.1)
    with pytest.raises(ValueError, match="lacks 3 of the optimizer's 4"):
        hvd.DistributedOptimizer(sgd, [("only", params[0])])
    with pytest.raises(ValueError, match=r"model\.named_parameters\(\), not the model"):
        hvd.DistributedOptimizer(sgd, model)
    with pytest.raises(ValueError, match="two parameters named 'same'"):
        hvd.DistributedOptimizer(sgd, [("same", p) for p in params])
    with pytest.raises(ValueError, match=r"\(name, parameter\) pairs"):
        hvd.DistributedOptimizer(sgd, params)
    with pytest.raises(ValueError, match="did you mean 'gradient_allreduce'"):
        hvd.DistributedOptimizer(sgd, algorithm="gradient_alreduce")
    with pytest.raises(ValueError, match="at least 1"):
        hvd.DistributedOptimizer(sgd, backward_passes_per_step=0)


WRONG = {
    "num_groups=-1": ({"num_groups": -1}, "num_groups=-1: a number of buckets"),
    "num_groups=True": ({"num_groups": True}, "num_groups=True"),
    "num_groups=1.5": ({"num_groups": 1.5}, "num_groups=1.5"),
    "groups=-2": ({"groups": -2}, "num_groups=-2"),
    "groups of letters": ({"groups": "abc"}, "list of lists of parameters"),
    "groups of no parameters": ({"groups": [["weight"]]}, "list of lists of parameters"),
    "groups without lists": ({"groups": [torch.ones(2, 2)]}, "list of lists of parameters"),
    "compression": ({"compression": "fp16"}, r"give Compression\.fp16"),
    "compression misspelt": ({"compression": "minmax_u9"}, r"did you mean 'minmax_u8'\?"),
    "no compression": ({"compression": None}, r"give Compression\.none"),
    "op": ({"op": "sum"}, r"is no reduction; give bagua\.Average.*mean 'Sum'\?"),
    "predivide": ({"gradient_predivide_factor": 0.0}, "above 0, not 0.0"),
    "process set": ({"process_set": None}, "process_set=None is none"),
    "passes": ({"backward_passes_per_step": 1.5}, "at least 1, not 1.5"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(hvd, what):
    keywords, words = WRONG[what]
    sgd = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(hvd.UsageError, match=words):
        hvd.DistributedOptimizer(sgd, **keywords)


def test_a_parameter_in_two_groups(hvd):
    params = list(mlp().parameters())
    with pytest.raises(hvd.UsageError, match="a parameter twice"):
        hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), groups=[params, params[:1]])


def test_skip_synchronize_and_explicit_synchronize(everyone, hvd):
    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for inputs, targets in batches(everyone, 2):
        optimizer.zero_grad()
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        reference.zero_grad()
        loss_of(oracle, inputs, targets).backward()
        reference.step()
    assert_close(model, oracle)


@pytest.mark.parametrize("algorithm", [DiLoCo, LocalSGD, Decentralized])
def test_weights_travel_where_synchronize_is_skipped(everyone, hvd, algorithm):
    """What it skips is of gradients."""

    def train(skips: bool) -> torch.Tensor:
        param = nn.Parameter(torch.full((4,), float(everyone.me)))
        sgd = torch.optim.SGD([param], lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, algorithm=algorithm(every=2))
        for _ in range(4):
            param.grad = torch.full_like(param, everyone.me + 1.0)
            with optimizer.skip_synchronize() if skips else contextlib.nullcontext():
                optimizer.step()
        return param.detach()

    assert torch.equal(train(True), train(False))


@pytest.mark.parametrize("first", ["the hook", "the wrapper"])
def test_a_step_in_backward(everyone, hvd, first):
    """By a hook that is called when a gradient is there, before ours or after it."""
    model, oracle = mlp(), mlp()
    wrapped: dict[torch.Tensor, Any] = {}

    def step(param: torch.Tensor) -> None:
        wrapped[param].step()
        wrapped[param].zero_grad()

    for param in model.parameters():
        if first == "the hook":
            param.register_post_accumulate_grad_hook(step)
        wrapped[param] = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1))
        if first == "the wrapper":
            param.register_post_accumulate_grad_hook(step)
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for inputs, targets in batches(everyone, 4):
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        reference.zero_grad()
        loss_of(oracle, inputs, targets).backward()
        reference.step()
    assert_close(model, oracle)


def test_gradients_put_there_by_hand_are_exchanged_at_step(everyone, hvd):
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model.weight.grad = torch.full((1, 2), float(everyone.me))
    optimizer.step()
    assert model.weight.tolist() == [[-(everyone.size - 1) / 2] * 2]


@pytest.mark.parametrize("never", [False, True])
def test_a_rank_that_joins_early(everyone, hvd, never):
    """It contributes zeros, also where buckets are many, and also if it never had a batch."""
    model, oracle = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer._driver._plan.bucket_nbytes = 100
    optimizer._driver.layout.rebuild([list(optimizer._driver.layout.slots.values())])
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    last = everyone.size - 1
    batches_of_last = 0 if never else 2
    for step, (inputs, targets) in enumerate(batches(everyone, 4)):
        late = step >= batches_of_last and everyone.size > 1
        if everyone.me != last or not late:
            optimizer.zero_grad()
            loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
            optimizer.step()
        busy = everyone.size - 1 if late else everyone.size
        reference.zero_grad()
        loss = loss_of(oracle, inputs[: busy * BATCH], targets[: busy * BATCH])
        (loss * busy / everyone.size).backward()
        reference.step()
    assert hvd.join() in everyone.ranks
    if everyone.me != last or everyone.size == 1:
        assert_close(model, oracle)
    hvd.barrier()


def _layer_above(width: int = 60, bias: bool = True) -> nn.Module:
    """Below it is a parameter whose bucket is the last, which waits for the end of backward."""
    layer = nn.Linear(width, width, bias=bias)
    layer.below = nn.Parameter(torch.ones(1))
    return layer


def _wrapped(hvd, layer):
    above = [param for param in layer.parameters() if param is not layer.below]
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(sgd, groups=[above, [layer.below]])


def _rows(layer, rank):
    return torch.full((2, layer.in_features), 1.0 + rank) * layer.below


def _contribute_once(layer, rank):
    layer(_rows(layer, rank)).square().mean().backward()


def _after_a_step(everyone, hvd):
    """A layer that has got one contribution on every rank, and its optimizer."""
    layer = _layer_above()
    hvd.broadcast_parameters(layer.state_dict(), root_rank=0)
    optimizer = _wrapped(hvd, layer)
    _contribute_once(layer, everyone.me)
    optimizer.step()
    return layer, optimizer


def _contribute_twice(layer, rank):
    """Both parts of one backward reach the layer, the second after the first was launched."""
    from torch.utils.checkpoint import checkpoint

    hidden = checkpoint(layer, _rows(layer, rank), use_reentrant=True)
    layer(hidden).square().mean().backward()


@pytest.mark.parametrize("overlap", [True], indirect=True)  # else nothing is in flight
def test_a_late_contribution_to_memory_in_flight_is_refused(everyone, hvd, overlap):
    """Autograd adds in place to zeroed gradients, behind the exchange's back."""
    layer, optimizer = _after_a_step(everyone, hvd)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(hvd.UsageError, match="second contribution"):
        _contribute_twice(layer, everyone.me)
    optimizer.zero_grad()
    _contribute_twice(layer, everyone.me)
    optimizer.step()
    assert_same_everywhere(hvd, layer)


@pytest.mark.parametrize("first", ["once", "twice"])
@pytest.mark.parametrize(("width", "set_to_none"), [(20, True), (400, True), (400, False)])
def test_a_late_contribution_elsewhere_counts(everyone, hvd, width, set_to_none, first):
    torch.manual_seed(0)
    layer, oracle = (_layer_above(width, bias=set_to_none) for _ in range(2))
    oracle.load_state_dict(layer.state_dict())
    optimizer = _wrapped(hvd, layer)
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    # What the first pass shows is exchanged when backward is over; what comes later, once more.
    for step in range(4):
        contribute = _contribute_once if first == "once" and step == 0 else _contribute_twice
        optimizer.zero_grad(set_to_none=set_to_none)
        contribute(layer, everyone.me)
        optimizer.step()
        reference.zero_grad()
        for rank in range(everyone.size):
            contribute(oracle, rank)
        for param in oracle.parameters():
            param.grad /= everyone.size
        reference.step()
    assert_close(layer, oracle)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlap", [True], indirect=True)
def test_a_late_contribution_on_one_rank_meets_no_other_step(everyone, hvd, overlap):
    """Nobody knew of it in the first pass, and the others do not now: an error, on all."""
    layer, optimizer = _after_a_step(everyone, hvd)
    optimizer.zero_grad()

    def go_on():
        contribute = _contribute_twice if everyone.me == 0 else _contribute_once
        for _ in range(2):  # the others have gone on when they hear of it
            contribute(layer, everyone.me)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(hvd.PeerError, match="earlier exchanges in this step"):
        go_on()
    optimizer = _wrapped(hvd, layer)
    optimizer.zero_grad()
    hvd.broadcast_parameters(layer.state_dict(), root_rank=0)
    _contribute_once(layer, everyone.me)
    optimizer.step()
    assert_same_everywhere(hvd, layer)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlap", [True], indirect=True)
def test_ranks_may_differ_in_how_often_they_contribute(everyone, hvd, overlap):
    layer, oracle = _layer_above(), _layer_above()
    hvd.broadcast_parameters(layer.state_dict(), root_rank=0)
    oracle.load_state_dict(layer.state_dict())
    optimizer = _wrapped(hvd, layer)
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (_contribute_twice if everyone.me == 0 else _contribute_once)(layer, everyone.me)
        optimizer.step()
        reference.zero_grad()
        for rank in range(everyone.size):
            (_contribute_twice if rank == 0 else _contribute_once)(oracle, rank)
        for param in oracle.parameters():
            param.grad /= everyone.size
        reference.step()
    assert_close(layer, oracle)


@pytest.mark.ranks(2, 3)
def test_a_pass_that_one_rank_has_more_meets_no_other_step(everyone, hvd):
    model, other = mlp(), torch.nn.Linear(6, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, num_groups=2)
    inputs, targets = next(iter(batches(everyone, 1)))

    def step(more: bool) -> None:
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        loss_of(model if more else other, inputs, targets).backward()
        optimizer.step()

    def go_on() -> None:
        for _ in range(2):
            step(more=everyone.me == 0)

    step(more=True)
    with pytest.raises(hvd.PeerError, match="earlier exchanges in this step"):
        go_on()
    optimizer = hvd.DistributedOptimizer(sgd, num_groups=2)
    step(more=True)  # as often on all ranks
    hvd.barrier()


def test_a_layer_without_a_shape_is_refused(hvd):
    with pytest.raises(hvd.UsageError, match="run it forward once"):
        hvd.DistributedOptimizer(torch.optim.SGD(torch.nn.LazyLinear(3).parameters(), lr=0.1))


@pytest.mark.parametrize("algorithm", [None, "fp16", "topk"])
@pytest.mark.parametrize("thaws", [True, False])
def test_what_is_frozen_or_thawed_after_zero_grad_counts(everyone, hvd, algorithm, thaws):
    """As in loops that call zero_grad() last; what is clipped is everybody's gradient."""
    model, oracle = mlp(), mlp()
    compression = hvd.Compression.fp16 if algorithm == "fp16" else hvd.Compression.none
    chosen = TopK(hierarchical=False, density=0.5) if algorithm == "topk" else None

    def sgd(of):
        return torch.optim.SGD(of.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    optimizer = hvd.DistributedOptimizer(sgd(model), compression=compression, algorithm=chosen)
    reference = sgd(oracle)
    for of in (model, oracle):
        of[0].weight.requires_grad_(not thaws)
    for step, (inputs, targets) in enumerate(batches(everyone, 5)):
        optimizer.zero_grad()
        reference.zero_grad()
        if step == 2:
            for of in (model, oracle):
                of[0].weight.requires_grad_(thaws)
        before = model[0].weight.detach().clone()
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        loss_of(oracle, inputs, targets).backward()
        for of in (model, oracle):
            torch.nn.utils.clip_grad_norm_(of.parameters(), 0.05)
        optimizer.step()
        reference.step()
        assert torch.equal(model[0].weight, before) == (thaws == (step < 2))
    if algorithm is None:
        assert_close(model, oracle)
    assert_same_everywhere(hvd, model)
