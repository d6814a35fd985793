"""Training that was saved on some ranks goes on on another number of them, in other processes.

What is a rank's own means nothing there: it begins anew, on all ranks alike, and a warning says so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parallel.processes import make_run_ranks

pytestmark = pytest.mark.slow

# What each one keeps of its own; the others have nothing to lose, and nothing is said.
KEEPS = {
    "async_model_average": True,
    "bytegrad": False,
    "decentralized": True,
    "diloco": True,
    "gradient_allreduce": False,
    "local_sgd": True,
    "low_precision_decentralized": True,
    "powersgd": True,
    "qadam": True,
    "topk": True,
    "bytegrad, feedback": True,
    "diloco, forward": True,
    "sign1": True,
    "topk, momentum": True,
}
BETWEEN_STEPS = {
    "async_model_average",
    "decentralized",
    "diloco",
    "diloco, forward",
    "local_sgd",
    "low_precision_decentralized",
}
SAVED_AT = 7  # steps; in the middle of a round

PROGRAM = """
import json, sys, time, warnings
from dataclasses import replace
import torch
import bagua.torch as hvd
from bagua.algorithms import Algorithm, ByteGrad, DiLoCo, TopK, find, names

what, folder, saved_size, saved_at = json.loads(sys.argv[1])
hvd.init()
me = hvd.rank()
options = {
    "async_model_average": {"sync_interval_ms": 0},
    "diloco": {"every": 4},
    "local_sgd": {"every": 4},
    "powersgd": {"warmup_steps": 2},
    "qadam": {"warmup_steps": 4},
}
# Ranks that share memory encode nothing if they are hierarchical.
algorithms = {n: replace(find(n), hierarchical=False, **options.get(n, {})) for n in names()}
algorithms["bytegrad, feedback"] = ByteGrad(hierarchical=False, error_feedback=True)
algorithms["diloco, forward"] = DiLoCo(every=4, when="forward", codec="minmax_u8")
algorithms["sign1"] = Algorithm(codec="sign1")
algorithms["topk, momentum"] = TopK(momentum_correction=0.5, density=0.1, hierarchical=False)

def made(algorithm):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.Tanh(), torch.nn.Linear(60, 20))
    momentum = 0.0 if algorithm.momentum_correction else 0.5
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    if algorithm.what == "momentum":
        inner = hvd.QAdam(model.parameters(), lr=0.01, warmup_steps=algorithm.warmup_steps)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=algorithm)
    return model, optimizer

def loss_of(model, inputs):
    return (model(inputs) - inputs.flip(1)).square().mean()

def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * me + step)
        loss_of(model, torch.randn(8, 20, generator=generator)).backward()
        optimizer.step()

def test_loss(model):
    inputs = torch.randn(99, 20, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return float(loss_of(model, inputs))

def spread(model):
    '''How far any weight is from the same one of the first rank.'''
    mine = [param.detach() for param in model.parameters()]
    first = hvd.broadcast_object(mine, 0)
    mine = max(float((a - b).abs().max()) for a, b in zip(mine, first))
    return max(hvd.allgather_object(mine))

def save(name, algorithm):
    model, optimizer = made(algorithm)
    train(model, optimizer, range(saved_at))
    torch.save((model.state_dict(), optimizer.state_dict()), f"{folder}/{name}.{me}")

def load(name, algorithm):
    model, optimizer = made(algorithm)
    fresh = test_loss(model)
    rank = me if me < saved_size else 0  # one that was not there takes what another has saved
    weights, state = torch.load(f"{folder}/{name}.{rank}", weights_only=False)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    first = torch.load(f"{folder}/{name}.0", weights_only=False)[0]
    rates = [group["lr"] for group in optimizer.param_groups]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(model, optimizer, range(saved_at, saved_at + 1))
        begins = model.state_dict()
        moved = max(float((begins[key] - first[key]).abs().max()) for key in first)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        before = test_loss(model)
        train(model, optimizer, range(saved_at + 1, 40))
    apart = spread(model)
    optimizer.settle()
    said = [str(w.message) for w in caught if "begins anew" in str(w.message)]
    return dict(said=said, moved=moved, fresh=fresh, before=before, after=test_loss(model),
                apart=apart, settled=spread(model), steps=optimizer.progress[0])

results = {name: (save if what == "save" else load)(name, a) for name, a in algorithms.items()}
json.dump(results, open(f"{folder}/results.{me}", "w"))
hvd.shutdown()
"""


@pytest.fixture(scope="module", params=[(2, 3), (3, 2)], ids=lambda pair: "to".join(map(str, pair)))
def resized(request, tmp_path_factory):
    """Numbers of ranks before and after, and what every rank then tells of every algorithm."""
    before, after = request.param
    folder: Path = tmp_path_factory.mktemp("ranks")
    for what, size in (("save", before), ("load", after)):
        choice = json.dumps([what, str(folder), before, SAVED_AT])
        result = make_run_ranks(folder)(size, PROGRAM, choice, timeout_s=120)
        assert result.exit_code == 0, result
    told = [json.loads((folder / f"results.{rank}").read_text()) for rank in range(after)]
    assert set(told[0]) == set(KEEPS), "an algorithm without a word on what it keeps"
    return before, after, told


@pytest.mark.parametrize("name", list(KEEPS))
def test_goes_on_on_another_number_of_ranks(resized, name):
    before, after, told = resized
    for rank, mine in enumerate(theirs[name] for theirs in told):
        # What has nothing to count by does not save how far it has come.
        assert mine["steps"] == (40 - SAVED_AT if name == "gradient_allreduce" else 40)
        # All begin with the first rank's weights, and with its momentum, which all had in common.
        assert mine["moved"] > 1e-3 if name == "diloco" else mine["moved"] < 1e-6
        assert mine["after"] < 0.8 * mine["before"] < 0.8 * mine["fresh"], "it learns on"
        assert mine["settled"] == 0
        assert name in BETWEEN_STEPS or mine["apart"] == 0, "replicas are equal at every step"
        assert bool(mine["said"]) == KEEPS[name]
        for words in mine["said"]:
            assert f"it is of {before} ranks, this is one of {after}. " in words, f"rank {rank}"
            assert "settle() before saving for another number" in words
            assert ("the first rank's weights" in words) == (name in BETWEEN_STEPS)
