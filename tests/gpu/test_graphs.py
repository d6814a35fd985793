"""Whole steps, captured in a CUDA graph and replayed, are what the same steps are without one.

What goes by the host is refused; a rank alone needs NCCL only for what it scales. make test-gpu
runs this both without NCCL and with it.
"""

import pytest
import torch

from bagua.algorithms import Algorithm
from gpu.sharing import has_nccl

pytestmark = pytest.mark.ranks(1, 2)


class Trained:
    """A model that takes steps with the inputs that are in its place for them."""

    def __init__(self, hvd, algorithm, **keywords):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5)
        ).cuda()
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(sgd, named, algorithm=algorithm, **keywords)
        self.inputs = torch.empty(16, 20, device="cuda")

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()


def draw_for(hvd):
    generator = torch.Generator().manual_seed(1 + hvd.rank())
    return lambda: torch.randn(16, 20, generator=generator)


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", "bytegrad", Algorithm(codec="topk", density=0.1)]
)
def test_a_whole_step_is_captured_or_refused(hvd, algorithm, factor):
    scaled = {"gradient_predivide_factor": factor}
    eager, graphed = (Trained(hvd, algorithm, **scaled) for _ in range(2))
    draw = draw_for(hvd)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            inputs = draw()
            for one in (eager, graphed):
                one.inputs.copy_(inputs)
                one.step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    if (hvd.size() > 1 or factor != 1) and not has_nccl(hvd):
        refused = pytest.raises(hvd.UsageError, match="cannot be captured in a CUDA graph")
        with refused, torch.cuda.graph(graph):
            graphed.step()
        torch.cuda.synchronize()
        return
    with torch.cuda.graph(graph):
        graphed.step()
    for _ in range(5):
        inputs = draw()
        for one in (eager, graphed):
            one.inputs.copy_(inputs)
        eager.step()
        graph.replay()
    torch.cuda.synchronize()
    for mine, other in zip(eager.model.parameters(), graphed.model.parameters()):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    mine = torch.cat([param.detach().cpu().flatten() for param in graphed.model.parameters()])
    for theirs in hvd.allgather_object(mine):
        assert torch.equal(theirs, mine)


def test_a_step_by_weights_is_refused(hvd):
    """A graph would meet the same peers for ever."""
    trained = Trained(hvd, Algorithm(what="weight", peers="shift_one", when="step"))
    trained.inputs.copy_(draw_for(hvd)())
    for _ in range(2):
        trained.step()
    refused = pytest.raises(hvd.UsageError, match="cannot be captured in a CUDA graph")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        trained.step()
    torch.cuda.synchronize()
