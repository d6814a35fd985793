"""What those who ask for it, by the level of the log, are told of the algorithm."""

from __future__ import annotations

import re

PROGRAM = """
import torch, bagua.torch as bagua
from bagua.algorithms import Algorithm, ByteGrad, LocalSGD
from dataclasses import dataclass

@dataclass(frozen=True)
class Later(ByteGrad):
    def at(self, step):
        return Algorithm() if step < 2 else ByteGrad(codec="fp16")

bagua.init(log_level={level!r})
param = torch.nn.Parameter(torch.ones(3, 4))
optimizer = bagua.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), algorithm=Later())
for step in range(6):
    if step == 4:
        optimizer.set_algorithm(LocalSGD(every=2))
    param.grad = torch.ones_like(param)
    optimizer.step()
optimizer.settle()
"""


def told(result):
    pattern = re.compile(r"optimizer\.0 \(SGD\) communicates by (\w+)\(.*?\)(.*)")
    return [[match.groups() for match in pattern.finditer(text)] for text in result.stderr]


def test_the_first_rank_tells_what_is_used_and_its_changes(run_ranks):
    result = run_ranks(2, PROGRAM.format(level="info"))
    assert result.exit_code == 0, str(result)
    first, second = told(result)
    changes = ["", ", from step 2 on", ", from step 4 on"]
    assert first == list(zip(["Algorithm", "ByteGrad", "LocalSGD"], changes)), str(result)
    assert second == []


def test_nobody_is_told_who_has_not_asked(run_ranks):
    result = run_ranks(2, PROGRAM.format(level="warning"))
    assert result.exit_code == 0, str(result)
    assert told(result) == [[], []]
