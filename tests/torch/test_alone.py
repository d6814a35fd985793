"""Who has wrapped nothing hears so once, and nobody else does."""

from __future__ import annotations

import pytest

PROGRAM = """
import warnings, torch, bagua.torch as bagua

case = "CASE"
bagua.init()
param = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([param], lr=0.1)
if case == "wrapped":
    wrapped = bagua.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1))
if case == "broadcast":
    bagua.broadcast_parameters({"param": param}, root_rank=0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in range(50):
        param.grad = torch.ones_like(param)
        if case == "by hand" or (case == "weights by hand" and step % 10 == 0):
            bagua.allreduce_(param.grad if case == "by hand" else param.data)
        optimizer.step()
told = [str(each.message) for each in caught if "a model of its own" in str(each.message)]
print(f"{len(told)} {told[0].split()[0] if told else ''}".strip())
"""


@pytest.mark.parametrize(
    ("np", "case", "told"),
    [
        (2, "alone", "1 SGD"),
        (2, "broadcast", "1 SGD"),
        (2, "by hand", "0"),
        (2, "weights by hand", "0"),
        (2, "wrapped", "0"),
        (1, "alone", "0"),
    ],
)
def test_is_told(run_ranks, np, case, told):
    result = run_ranks(np, PROGRAM.replace("CASE", case))
    assert result.exit_code == 0, str(result)
    assert [out.strip() for out in result.stdout] == [told] + ["0"] * (np - 1), str(result)
