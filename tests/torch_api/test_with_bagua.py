"""`model.with_bagua` against one process that trains on everyone's batches."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
from torch import nn

from bagua.common.objects import allgather_object
from bagua.common.world import remove_process_set, world

pytestmark = pytest.mark.ranks(1, 2, 3)

BATCH = 4


@pytest.fixture(params=[True, False], ids=["during backward", "after backward"])
def overlap(request, monkeypatch, bagua):
    """When buckets leave, which otherwise depends on the machine."""
    monkeypatch.setattr(world(), "overlaps", lambda busy_threads: request.param)


@pytest.fixture
def allreduce(bagua):
    return bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(everyone, steps: int):
    """Per step everyone's inputs and targets, one below the other."""
    generator = torch.Generator().manual_seed(0)
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


def train(everyone, model, optimizers, steps=4):
    for inputs, targets in batches(everyone, steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        for optimizer in optimizers:
            optimizer.step()


def train_oracle(everyone, model, optimizers, steps=4):
    for inputs, targets in batches(everyone, steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_close(model, oracle) -> None:
    for ours, right in zip(model.state_dict().values(), oracle.state_dict().values()):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def assert_same_everywhere(model) -> None:
    from bagua.torch import allgather_object

    for theirs in allgather_object(list(model.state_dict().values())):
        for tensor, ours in zip(theirs, model.state_dict().values()):
            assert torch.equal(tensor, ours)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_equals_training_on_all_batches(everyone, bagua, overlap, allreduce, kind):
    model, oracle = mlp(seed=everyone.me), mlp()
    optimizer, reference = (OPTIMIZERS[kind](m.parameters()) for m in (model, oracle))
    assert model.with_bagua([optimizer], allreduce) is model
    assert model.bagua_algorithm is allreduce
    train(everyone, model, [optimizer])
    train_oracle(everyone, oracle, [reference])
    assert_close(model, oracle)
    assert_same_everywhere(model)


def test_two_optimizers(everyone, bagua, overlap, allreduce):
    model, oracle = mlp(seed=everyone.me), mlp()
    pairs = [
        [torch.optim.SGD(m[0].parameters(), lr=0.1), torch.optim.Adam(m[2].parameters(), lr=0.01)]
        for m in (model, oracle)
    ]
    model.with_bagua(pairs[0], allreduce)
    train(everyone, model, pairs[0])
    train_oracle(everyone, oracle, pairs[1])
    assert_close(model, oracle)
    assert_same_everywhere(model)


def test_models_that_share_an_optimizer(everyone, bagua, allreduce):
    encoder, decoder = nn.Linear(6, 8), nn.Linear(8, 3)
    both = nn.Sequential(encoder, decoder)
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    encoder.with_bagua([optimizer], allreduce)
    decoder.with_bagua([optimizer], allreduce)
    assert_same_everywhere(both)
    oracle = copy.deepcopy(both)
    train(everyone, both, [optimizer])
    train_oracle(everyone, oracle, [torch.optim.SGD(oracle.parameters(), lr=0.1)])
    assert_close(both, oracle)


def test_two_models_take_turns(everyone, bagua, overlap):
    """As a GAN: what one model's loss leaves in the other is thrown away by zero_grad."""
    sums = bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm(average=False)
    models = [mlp(), nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for model, optimizer in zip(models, optimizers):
        model.with_bagua([optimizer], sums)
    oracles = copy.deepcopy(models)
    references = [torch.optim.SGD(model.parameters(), lr=0.01) for model in oracles]
    for inputs, _ in batches(everyone, 3):
        for which in (0, 1):
            optimizers[which].zero_grad()
            models[1](models[0](mine(everyone, inputs))).square().sum().backward()
            optimizers[which].step()
            references[which].zero_grad()
            oracles[1](oracles[0](inputs)).square().sum().backward()
            references[which].step()
    for model, oracle in zip(models, oracles):
        assert_close(model, oracle)


def test_state_is_that_of_the_first_rank(everyone, bagua, allreduce):
    """Frozen parameters, buffers, also those that are in no state_dict, and the optimizer's."""
    torch.manual_seed(everyone.me)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    model.register_buffer("secret", torch.full((2,), float(everyone.me)), persistent=False)
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.1 * (everyone.me + 1))
    if everyone.me == 0:
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        model[1].running_mean.fill_(7)
    before = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.with_bagua([optimizer], allreduce)
    assert_same_everywhere(model)
    assert model.secret.tolist() == [0, 0]
    assert model[1].running_mean.tolist() == [7] * 8
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state[model[2].weight]["step"] == 1
    if everyone.me == 0:
        assert_close(model, before)


def test_parameters_of_no_optimizer_are_warned_of(everyone, bagua, allreduce):
    model = mlp(seed=everyone.me)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"2 parameters .* \(0.weight, 0.bias\)") as caught:
        model.with_bagua([optimizer], allreduce)
    assert caught[0].filename == __file__
    assert_same_everywhere(model)
    model(torch.full((1, 6), float(everyone.me))).sum().backward()
    assert model[0].weight.grad is not None


def test_switching(everyone, bagua, allreduce):
    model, oracle = mlp(seed=everyone.me), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
    sums = bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm(average=False)
    for algorithm in (allreduce, sums, "bytegrad", allreduce):
        model.with_bagua([optimizer], algorithm)
        assert model.bagua_algorithm is algorithm
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / everyone.size if algorithm is sums else 0.1
        if algorithm is sums:  # forgets that the momentum of a sum is one
            optimizer.state.clear()
            reference.state.clear()
        train(everyone, model, [optimizer], steps=2)
        train_oracle(everyone, oracle, [reference], steps=2)
        assert_close(model, oracle)
        assert_same_everywhere(model)
        if algorithm is sums:
            optimizer.state.clear()
            reference.state.clear()
    assert len(model.bagua_training.attachments) == 1
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_other_optimizers_take_over(everyone, bagua, allreduce):
    """Those of before exchange no more, from now on and not from when they are collected."""
    model, oracle = mlp(seed=everyone.me), mlp()
    gc.disable()
    try:
        first = torch.optim.SGD(model.parameters(), lr=0.5)
        model.with_bagua([first], allreduce)
        train(everyone, model, [first], steps=1)
        gradients = weakref.ref(model.bagua_training.attachments[0].distributed)
        second = torch.optim.SGD(model.parameters(), lr=0.1)
        model.with_bagua([second], allreduce)
        assert gradients() is None
    finally:
        gc.enable()
    assert not first._optimizer_step_pre_hooks
    assert "zero_grad" not in vars(first)
    first.zero_grad()
    train(everyone, model, [second], steps=2)
    train_oracle(everyone, oracle, [torch.optim.SGD(oracle.parameters(), lr=0.5)], steps=1)
    train_oracle(everyone, oracle, [torch.optim.SGD(oracle.parameters(), lr=0.1)], steps=2)
    assert_close(model, oracle)


def test_accumulation(everyone, bagua, overlap, allreduce):
    model, oracle = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    model.with_bagua([optimizer], allreduce)
    for number, (inputs, targets) in enumerate(batches(everyone, 6)):
        loss_of(model, mine(everyone, inputs), mine(everyone, targets)).backward()
        loss_of(oracle, inputs, targets).backward()
        if number % 3 == 2:
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
    assert_close(model, oracle)
    assert_same_everywhere(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 3, bias=False)
        self.decoder = nn.Linear(6, 3, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs):
        return self.decoder(self.encoder(inputs) @ self.encoder.weight)


def test_tied_weights(everyone, bagua, overlap, allreduce):
    torch.manual_seed(everyone.me)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.with_bagua([optimizer], allreduce)
    assert model.decoder.weight is model.encoder.weight
    oracle = copy.deepcopy(model)
    train(everyone, model, [optimizer])
    train_oracle(everyone, oracle, [torch.optim.SGD(oracle.parameters(), lr=0.01)])
    assert_close(model, oracle)


def test_mixed_element_types(everyone, bagua, allreduce):
    torch.manual_seed(everyone.me)
    model = nn.ParameterList(
        [nn.Parameter(torch.randn(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
        + [nn.Parameter(torch.randn(5).to(torch.bfloat16))]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.with_bagua([optimizer], allreduce)
    before = [param.detach().clone() for param in model]
    sum((param * (everyone.me + 1)).sum().double() for param in model).backward()
    optimizer.step()
    mean = (everyone.size + 1) / 2
    for param, start in zip(model, before):
        torch.testing.assert_close(param.detach(), start - mean)


def test_a_closure(everyone, bagua, allreduce):
    model, oracle = mlp(), mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    reference = torch.optim.LBFGS(oracle.parameters(), max_iter=5)
    model.with_bagua([optimizer], allreduce)
    ((inputs, targets),) = batches(everyone, 1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, mine(everyone, inputs), mine(everyone, targets))
        loss.backward()
        return loss

    def right():
        reference.zero_grad()
        loss = loss_of(oracle, inputs, targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    reference.step(right)
    for ours, theirs in zip(model.parameters(), oracle.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([sgd], allreduce)
    sgd.step(closure=closure)
    assert_same_everywhere(model)


def test_gradients_are_averaged_when_backward_returns(everyone, bagua, allreduce):
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], allreduce)
    model(torch.full((1, 1), float(everyone.me))).sum().backward()
    assert model.weight.grad.item() == (everyone.size - 1) / 2


def test_a_scheduler_and_a_scaler(everyone, bagua, allreduce):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], allreduce)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ((inputs, targets),) = batches(everyone, 1)
    scaler.scale(loss_of(model, mine(everyone, inputs), mine(everyone, targets))).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    oracle = mlp()
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    loss_of(oracle, inputs, targets).backward()
    reference.step()
    assert_close(model, oracle)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("known", [False, True])
def test_a_step_of_sums_that_a_scaler_skips(everyone, bagua, overlap, known):
    """Nobody tells of a zero_grad where the optimizers are unknown, or of the model's."""
    sums = bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm(average=False)
    model, oracle = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer] if known else [], sums)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, (inputs, targets) in enumerate(batches(everyone, 3)):
        loss = loss_of(model, mine(everyone, inputs), mine(everyone, targets))
        scaler.scale(loss * (torch.inf if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1 * everyone.size)
    for step, (inputs, targets) in enumerate(batches(everyone, 3)):
        if step != 1:
            reference.zero_grad()
            loss_of(oracle, inputs, targets).backward()
            reference.step()
    assert_close(model, oracle)
    loss_of(model, inputs, targets).backward()
    with pytest.raises(ValueError, match="on top of gradients that ranks have exchanged"):
        loss_of(model, inputs, targets).backward()
    model.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_overflows_on_one_rank(everyone, bagua, fused):
    """Where weights travel: it keeps its weights, and the others do not wait for it."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    model.with_bagua([optimizer], bagua.algorithms.decentralized.DecentralizedAlgorithm(False))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        bad = step == 1 and everyone.me == everyone.size - 1
        loss = model(torch.full((1, 1), torch.inf if bad else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (4.0 if everyone.me == everyone.size - 1 else 8.0)
    mean = sum(allgather_object(model.weight.item())) / everyone.size
    assert mean == pytest.approx(1 / everyone.size - 4.0)
    exact = bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()
    for _ in range(2 if everyone.size > 1 else 0):
        with pytest.raises(ValueError, match=r"forget_scaler\(\)"):
            model.with_bagua([optimizer], exact)
    optimizer.forget_scaler()
    model.with_bagua([optimizer], exact)


def test_nothing_is_left_in_what_is_saved_or_copied(everyone, bagua, allreduce):
    model = mlp()
    names = list(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters())
    model.with_bagua([optimizer], allreduce)
    train(everyone, model, [optimizer], steps=1)
    assert list(model.state_dict()) == names
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    assert len(list(model.modules())) == 4
    for clone in (copy.deepcopy(model), through_a_file(model)):
        assert_close(clone, model)
        assert not clone.bagua_training.attachments
        loss_of(clone, torch.ones(1, 6), torch.ones(1, 3)).backward()  # alone
    twin = copy.deepcopy(optimizer)
    assert not twin._optimizer_step_pre_hooks
    twin.zero_grad()
    train(everyone, model, [optimizer], steps=1)
    assert_same_everywhere(model)


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_without_optimizers(everyone, bagua, overlap):
    """Gradients are exchanged for whichever optimizers there will be."""
    model, oracle = mlp(seed=everyone.me), mlp()
    model.with_bagua([], "bytegrad")
    pairs = [
        [torch.optim.SGD(m[0].parameters(), lr=0.1), torch.optim.Adam(m[2].parameters(), lr=0.01)]
        for m in (model, oracle)
    ]
    train(everyone, model, pairs[0])
    train_oracle(everyone, oracle, pairs[1])
    assert_close(model, oracle)
    foreign = nn.Linear(1, 1)
    torch.optim.SGD(foreign.parameters(), lr=0.1).step()


def test_a_group(everyone, bagua, allreduce):
    """Ranks outside train on their own."""
    group = bagua.new_group({0, everyone.size - 1})
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, everyone.me)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.with_bagua([optimizer], allreduce, process_group=group)
    inside = everyone.me in group.ranks
    assert model.weight.item() == (0 if inside else everyone.me)
    model(torch.full((1, 1), float(everyone.me))).sum().backward()
    assert model.weight.grad.item() == ((everyone.size - 1) / 2 if inside else everyone.me)
    optimizer.step()


@pytest.mark.parametrize(
    "attribute",
    ["_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore"],
)
def test_what_is_ignored_stays_each_ranks_own(everyone, bagua, allreduce, attribute):
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    for tensor in (model[0].weight, model[1].bias, model[1].running_mean, model[1].running_var):
        nn.init.constant_(tensor, everyone.me)
    setattr(model, attribute, ["0.weight", "1.running_mean"])
    optimizer = torch.optim.SGD([model[0].weight, model[1].bias], lr=1.0)
    with pytest.warns(UserWarning, match=r"1 parameters .* \(1.weight\)"):
        ddp = bagua.data_parallel.DistributedDataParallel(
            model, optimizers=[optimizer], algorithm=allreduce
        )
    ddp(torch.ones(2, 1) * everyone.me)
    assert model[0].weight.item() == everyone.me
    # BatchNorm takes a tenth of the mean it sees, which is the square of the rank
    assert model[1].running_mean.item() == pytest.approx(everyone.me * (0.9 + 0.1 * everyone.me))
    (model[0].weight * everyone.me + model[1].bias * everyone.me).sum().backward()
    optimizer.step()
    assert model[0].weight.item() == 0
    assert model[1].bias.item() == -(everyone.size - 1) / 2


class Smoothed(nn.Module):
    """Its buffer is another tensor after each pass."""

    def __init__(self, start) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.register_buffer("ema", torch.full((1,), start))

    def forward(self, inputs):
        self.ema = 0.5 * self.ema + 0.5 * inputs.detach().mean()
        return self.line(inputs)


@pytest.mark.parametrize("how", ["ignored", "expert"])
def test_own_buffers_may_be_replaced(everyone, bagua, allreduce, how):
    model = mine = Smoothed(float(everyone.me))
    if how == "ignored":
        model._ddp_params_and_buffers_to_ignore = ["ema"]
    else:
        model = nn.Sequential(
            nn.Linear(1, 1), bagua.model_parallel.moe.MoE(1, mine), nn.BatchNorm1d(1)
        )
        mine = model[1].experts.experts[0]
        model.forward = lambda inputs: mine(inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = bagua.data_parallel.DistributedDataParallel(
        model, optimizers=[optimizer], algorithm=allreduce
    )
    for _ in range(3):
        ddp(torch.full((2, 1), float(everyone.me)))
        assert mine.ema.item() == everyone.me
    model.with_bagua([optimizer], allreduce)
    assert mine.ema.item() == everyone.me


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
@pytest.mark.parametrize("which", ["all ranks", "the last rank"])
def test_one_optimizer_cannot_switch(everyone, bagua, allreduce, known, which):
    """Then none does, on any rank, and the model trains on as before."""
    from bagua.algorithms import TopK

    model, oracle = mlp(), mlp()
    pairs = [[torch.optim.SGD(m[i].parameters(), lr=0.1) for i in (0, 2)] for m in (model, oracle)]
    optimizers = pairs[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that nobody steps yet
        model.with_bagua(optimizers if known else optimizers[:1], allreduce)
    before = attachments_of(model)
    wrong = which == "all ranks" or everyone.me == everyone.size - 1
    optimizers[1].param_groups[0]["momentum"] = 0.9 if wrong else 0.0
    words = "has a momentum of its own"
    with pytest.raises(ValueError, match=words):
        model.with_bagua(optimizers, TopK(momentum_correction=0.9))
    optimizers[1].param_groups[0]["momentum"] = 0.0
    assert attachments_of(model) == before
    assert model.bagua_algorithm is allreduce
    shared = slice(None if known else 1)  # those that with_bagua has heard of
    train(everyone, model, optimizers[shared])
    train_oracle(everyone, oracle, pairs[1][shared])
    assert_close(model, oracle)


def attachments_of(model):
    return [(each, each.distributed.algorithm) for each in model.bagua_training.attachments]


def test_no_optimizers_where_some_are_needed(everyone, bagua):
    """Weights that differ between ranks stay what they are."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], bagua.algorithms.Algorithm.init("decentralized"))
    train(everyone, model, [optimizer], steps=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="it has to know which"):
        model.with_bagua([], "decentralized")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_what_cannot_be(everyone, bagua, allreduce):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="list of optimizers"):
        model.with_bagua(optimizer, allreduce)
    with pytest.raises(ValueError, match="takes optimizers, not Linear"):
        model.with_bagua([model[0]], allreduce)
    with pytest.raises(ValueError, match="optimizer twice"):
        model.with_bagua([optimizer, optimizer], allreduce)
    with pytest.raises(ValueError, match="did you mean 'bytegrad'"):
        model.with_bagua([optimizer], "bitegrad")
    with pytest.raises(ValueError, match="or a name, not type"):
        model.with_bagua([optimizer], type(allreduce))
    with pytest.raises(ValueError, match="group made by new_group"):
        model.with_bagua([optimizer], allreduce, process_group=[0])
    model._ddp_params_and_buffers_to_ignore = ["0.wieght"]
    with pytest.raises(ValueError, match=r"no parameter or buffer '0.wieght'; did .* '0.weight'"):
        model.with_bagua([optimizer], allreduce)


@pytest.mark.ranks(2)
def test_algorithms_that_differ(everyone, bagua):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ["gradient_allreduce", "bytegrad"]
    with pytest.raises(ValueError, match="algorithms differ between ranks"):
        model.with_bagua([optimizer], names[everyone.me])


@pytest.mark.parametrize("before", ["another algorithm", "another optimizer", "another group"])
def test_after_a_call_that_fails_training_goes_on_as_before(everyone, bagua, allreduce, before):
    model, oracle = mlp(seed=everyone.me), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], allreduce)
    train(everyone, model, [optimizer], steps=1)
    wrong = bagua.algorithms.q_adam.QAdamAlgorithm(
        bagua.algorithms.q_adam.QAdamOptimizer(mlp().parameters())
    )
    given, group = [optimizer], None
    if before == "another optimizer":
        given = [torch.optim.SGD(model.parameters(), lr=0.3), torch.optim.Adam(model.parameters())]
    elif before == "another group":
        group = bagua.new_group([0])
    try:
        if group is None or everyone.me == 0:
            with pytest.raises(ValueError, match="QAdam"):
                model.with_bagua(given, wrong, group)
        train(everyone, model, [optimizer], steps=2)
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        assert model.bagua_algorithm is allreduce
    finally:
        if group is not None and everyone.size > 1:
            remove_process_set(group.process_set)
    sgd = torch.optim.SGD(oracle.parameters(), lr=0.1)
    train_oracle(everyone, oracle, [sgd], steps=1)
    train_oracle(everyone, oracle, [sgd], steps=2)
    assert_close(model, oracle)


def test_another_group_takes_over(everyone, bagua, allreduce):
    model, oracle = mlp(seed=everyone.me), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], allreduce)
    group = bagua.new_group([0])
    model.with_bagua([optimizer], allreduce, group)
    assert len(optimizer._optimizer_step_pre_hooks) == (everyone.me == 0)
    assert ("zero_grad" in vars(optimizer)) == (everyone.me == 0)
    model.with_bagua([optimizer], allreduce)
    train(everyone, model, [optimizer], steps=2)
    train_oracle(everyone, oracle, [torch.optim.SGD(oracle.parameters(), lr=0.1)], steps=2)
    assert_close(model, oracle)
    if everyone.size > 1:
        remove_process_set(group.process_set)
