"""torch.compile around a model, a step, an operation: everything of ours runs as it is."""

from __future__ import annotations

import warnings

import pytest
import torch

from bagua.algorithms import find, names

pytestmark = pytest.mark.ranks(1, 2)
STEPS = 12
IN_STEP = [name for name in names() if find(name).when != "background"]


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled, nothing that the compiler has told once."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(hvd, name: str, compiled: str) -> torch.Tensor:
    """Weights; compiled is the model, the optimizer's step, or all of a training step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    params = list(model.parameters())
    if name == "qadam":
        inner = hvd.QAdam(params, lr=0.01, warmup_steps=5)
    else:
        inner = torch.optim.SGD(params, lr=0.05)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=name)

    def loss_of(rows):
        return model(rows).square().mean()

    def train(rows):
        if compiled == "closure":
            optimizer.step(closure_of(rows))
            return
        optimizer.zero_grad()
        loss_of(rows).backward()
        step()

    def closure_of(rows):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(rows)
            loss.backward()
            return loss

        return closure

    step = optimizer.step
    if compiled == "step":
        step = torch.compile(step, backend="eager")
    elif compiled in ("everything", "closure"):
        train = torch.compile(train, backend="eager")
    elif compiled == "model":
        model = torch.compile(model, backend="aot_eager")
    generator = torch.Generator().manual_seed(1 + hvd.rank())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know")  # how to look into something
        for _ in range(STEPS):
            train(torch.randn(6, 8, generator=generator))
    optimizer.settle()
    return torch.cat([param.detach().flatten() for param in params])


@pytest.mark.parametrize(
    ("name", "compiled"),
    [(name, "everything") for name in IN_STEP]
    + [(name, "step") for name in ("gradient_allreduce", "decentralized")]
    + [(name, "closure") for name in ("gradient_allreduce", "local_sgd")]
    + [("gradient_allreduce", "model")],
)
def test_training(everyone, hvd, name, compiled):
    expected = trained(hvd, name, "")
    assert torch.equal(trained(hvd, name, compiled), expected)
    assert torch._dynamo.utils.counters["frames"]["ok"]  # something was compiled


def test_training_by_averages_in_the_background(everyone, hvd):
    mine = trained(hvd, "async_model_average", "everything")
    for theirs in hvd.allgather_object(mine):
        assert torch.equal(theirs, mine)


def test_operations(everyone, hvd):
    @torch.compile(backend="eager")
    def compute(x):
        gathered = hvd.allgather(x + 1)
        return hvd.allreduce(x * 2, op=hvd.Sum) + gathered.sum()

    ranks = torch.arange(everyone.size).float()
    x = torch.full((3,), float(everyone.me), requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know")
        result = compute(x.detach())
        hvd.allreduce(torch.compile(torch.sin, backend="eager")(x), op=hvd.Sum).sum().backward()
    assert torch.equal(result, (2 * ranks.sum() + 3 * (ranks + 1).sum()).expand(3))
    torch.testing.assert_close(x.grad, x.detach().cos() * everyone.size)


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_asynchronous_operations(everyone, hvd):
    """Dynamo says that it does not look into them."""

    @torch.compile(backend="eager")
    def compute(x):
        handle = hvd.allreduce_async(x * 2, op=hvd.Sum, name="double")
        return x + 1, hvd.synchronize(handle)

    mine, total = compute(torch.full((3,), float(everyone.me)))
    assert (mine == everyone.me + 1).all()
    assert (total == everyone.size * (everyone.size - 1)).all()
