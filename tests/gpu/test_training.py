"""Training on a GPU is what it is on a CPU, by every algorithm."""

from contextlib import nullcontext

import pytest
import torch

from bagua.algorithms import find, names
from gpu.composed import COMPOSED
from gpu.own import has_own

pytestmark = pytest.mark.ranks(1, 2)


def trained(hvd, algorithm, device, steps=6, amp=False, backend=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 5)
    ).to(device)
    if algorithm.what == "momentum":
        inner = hvd.QAdam(model.parameters(), lr=0.01, warmup_steps=algorithm.warmup_steps)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=algorithm)
    if backend:
        model = torch.compile(model, backend=backend)
    generator = torch.Generator().manual_seed(1 + hvd.rank())
    for _ in range(steps):
        inputs = torch.randn(16, 20, generator=generator).to(device)
        targets = torch.randn(16, 5, generator=generator).to(device)
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=amp):
            loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
    if hasattr(optimizer, "settle"):
        optimizer.settle()
    return torch.cat([param.detach().cpu().flatten() for param in model.parameters()])


@pytest.mark.parametrize("name", [*names(), *COMPOSED])
def test_every_algorithm(hvd, name):
    algorithm = COMPOSED.get(name) or find(name)
    on_gpu = trained(hvd, algorithm, "cuda")
    assert on_gpu.isfinite().all()
    if algorithm.when == "background":
        return  # when it averages is chance
    # A code may fall to the other side where a sum differs in its last bit.
    tolerance = 1e-5 if algorithm.codec in ("raw", "fp16", "bf16") else 2e-2
    torch.testing.assert_close(
        on_gpu, trained(hvd, algorithm, "cpu"), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_a_compiled_model(hvd, name, backend):
    expected = trained(hvd, find(name), "cuda")
    compiled = trained(hvd, find(name), "cuda", backend=backend)
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)


def test_replicas_are_equal_in_every_bit(hvd):
    mine = trained(hvd, find("bytegrad"), "cuda", steps=20)
    for theirs in hvd.allgather_object(mine):
        assert torch.equal(theirs, mine)


def test_autocast_and_a_scaler(hvd):
    model = torch.nn.Linear(30, 30).cuda()
    hvd.broadcast_parameters(model.state_dict())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    scaler = torch.amp.GradScaler("cuda")
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(8, 30, device="cuda")).square().mean()
        loss = scaler.scale(loss)
        if step == 2 and hvd.rank() == 0:
            loss = loss * torch.inf  # skipped, and on all ranks alike
        loss.backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    mine = model.weight.detach()
    assert mine.isfinite().all()
    for theirs in hvd.allgather_object(mine.cpu()):
        assert torch.equal(theirs, mine.cpu())


def test_a_model_in_two_places(hvd):
    first, second = torch.nn.Linear(4, 4).cuda(), torch.nn.Linear(4, 4)
    params = [*first.parameters(), *second.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    second(first(torch.ones(2, 4, device="cuda")).cpu()).sum().backward()
    optimizer.step()
    assert all(param.grad.device == param.device for param in params)


@pytest.mark.ranks(2)
def test_two_ranks_on_one_gpu_are_told(hvd):
    """And nobody else is."""
    from bagua.common.world import world

    told = pytest.raises(hvd.UsageError, match="ranks 0 and 1 train on one GPU")
    object.__setattr__(world().config, "allow_shared_gpu", False)
    try:
        with nullcontext() if has_own() else told:
            hvd.DistributedOptimizer(
                torch.optim.SGD(torch.nn.Linear(2, 2).cuda().parameters(), lr=0.1)
            )
    finally:
        object.__setattr__(world().config, "allow_shared_gpu", not has_own())
