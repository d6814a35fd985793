"""Bytes that a rank sends, by the engine's counters, are those that docs/algorithms.md names.

The table there is for many ranks; these are the formulas that it is the limit of.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parallel.processes import make_run_ranks

from bagua.algorithms import names

pytestmark = pytest.mark.slow

SHAPES = [(256, 512), (512, 256)]
COUNT = sum(rows * columns for rows, columns in SHAPES)
ROUND = 4  # steps, of local_sgd and diloco
LOW_RANK = 2

# Every rank is a machine of its own: otherwise memory is shared, and nothing sent.
PROGRAM = """
import json, sys
from dataclasses import replace
import torch
import bagua.torch as hvd
from bagua.algorithms import Algorithm, Decentralized, GradientAllreduce, find, names
from bagua.torch.pieces import land_all

shapes, every, low_rank, folder = json.loads(sys.argv[1])
STEPS = 12  # whole rounds of everything: of peers, and of local steps
hvd.init(transport="mpi")
options = {
    "diloco": {"every": every},
    "local_sgd": {"every": every},
    "powersgd": {"warmup_steps": 2, "low_rank": low_rank},
    "qadam": {"warmup_steps": 2},
    "async_model_average": {"sync_interval_ms": 0},
}
algorithms = {name: replace(find(name), **options.get(name, {})) for name in names()}
for codec in ("fp16", "bf16"):
    algorithms[f"gradient_allreduce {codec}"] = GradientAllreduce(codec=codec)
for codec in ("minmax_u4", "fp8_e4m3", "sign1"):
    algorithms[codec] = Algorithm(codec=codec, error_feedback=True)
for peers in ("all", "ring", "random", "exponential"):
    algorithms[f"decentralized {peers}"] = Decentralized(peers=peers)

def measured(algorithm):
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    inner = torch.optim.SGD(params, lr=0.0)
    if algorithm.what == "momentum":
        inner = hvd.QAdam(params, lr=0.0, warmup_steps=algorithm.warmup_steps)
    optimizer = hvd.DistributedOptimizer(inner, algorithm=algorithm)

    def train(steps):
        for _ in range(steps):
            for param in params:
                param.grad = torch.randn(param.shape)
            optimizer.step()
        if algorithm.when == "forward":
            land_all(optimizer._driver._pieces)  # what a step has begun belongs to it

    train(every)
    if algorithm.when != "background":
        before = hvd.counters()["sent_nbytes"]
        train(STEPS)
        return (hvd.counters()["sent_nbytes"] - before) / STEPS
    optimizer.settle()
    begun, start = [], optimizer._driver._start
    optimizer._driver._start = lambda: (begun.append(None), start())
    before = hvd.counters()["sent_nbytes"]
    train(STEPS)
    optimizer.settle()  # one exact average more
    return (hvd.counters()["sent_nbytes"] - before) / (len(begun) + 1)

torch.manual_seed(hvd.rank())
mine = {name: measured(algorithm) for name, algorithm in algorithms.items()}
everyones = hvd.allgather_object(mine)
if hvd.rank() == 0:
    means = {name: sum(sent[name] for sent in everyones) / hvd.size() for name in mine}
    open(folder + "/sent.json", "w").write(json.dumps(means))
hvd.shutdown()
"""


def all_of(n: int) -> float:
    """What a ring sends of an average of n ranks, of each byte."""
    return 2 * (n - 1) / n


def one_peer(n: int) -> float:
    """Of an odd number one rests."""
    return 4 if n % 2 == 0 else 4 * (n - 1) / n


def thin(n: int) -> float:
    """P and Q of every matrix."""
    return 4 * all_of(n) * sum(LOW_RANK * (rows + cols) for rows, cols in SHAPES) / COUNT


def coded(bits: float):
    return lambda n: all_of(n) * bits / 8


# Bytes per parameter and step, by the number of ranks.
FIGURES = {
    "gradient_allreduce": coded(32),
    "gradient_allreduce fp16": coded(16),
    "gradient_allreduce bf16": coded(16),
    "bytegrad": coded(8.13),
    "minmax_u4": coded(4.5),
    "fp8_e4m3": coded(8.06),
    "sign1": coded(1.02),
    "topk": lambda n: 0.06 * (n - 1),
    "powersgd": thin,
    "qadam": coded(8.13),
    "decentralized": one_peer,
    "decentralized random": one_peer,
    "decentralized exponential": lambda n: 4,
    "decentralized ring": lambda n: 8 if n > 2 else 4,  # to both neighbors, who may be one
    "decentralized all": coded(32),
    "low_precision_decentralized": lambda n: 2.03 if n > 2 else 2.03 / 2,
    "async_model_average": coded(32),  # per average
    "local_sgd": lambda n: coded(32)(n) / ROUND,
    "diloco": lambda n: coded(32)(n) / ROUND,
}


@pytest.fixture(scope="module", params=[2, 3, 4], ids="np{}".format)
def sent(request, tmp_path_factory) -> tuple[int, dict[str, float]]:
    """The number of ranks, and what one of them sends a step, per parameter."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    choice = json.dumps([SHAPES, ROUND, LOW_RANK, str(folder)])
    result = make_run_ranks(folder)(request.param, PROGRAM, choice, timeout_s=120)
    assert result.exit_code == 0, result
    nbytes = json.loads((folder / "sent.json").read_text())
    return request.param, {name: value / COUNT for name, value in nbytes.items()}


@pytest.mark.parametrize("name", [*names(), *(name for name in FIGURES if name not in names())])
def test_bytes_are_those_of_the_table(sent, name):
    n, measured = sent
    assert measured[name] == pytest.approx(FIGURES[name](n), rel=0.05)
