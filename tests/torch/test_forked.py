"""A child that is forked when the engine has ended, with what it left."""

from __future__ import annotations

PROGRAM = """
import gc, os
import torch
import bagua.torch as hvd

hvd.init()
param = torch.nn.Parameter(torch.zeros(1_000_000))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1))
param.sum().backward()
optimizer.step()
hvd.shutdown()
child = os.fork()
if child == 0:
    del optimizer, param
    gc.collect()
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
del optimizer
"""


def test_it_can_let_go_of_an_optimizer(run_ranks):
    result = run_ranks(2, PROGRAM, env={"BAGUA_HELPERS": "2"})
    assert result.exit_code == 0, str(result)
    assert result.stdout == ["3\n", "3\n"], str(result)
