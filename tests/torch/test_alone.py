"""Who has wrapped nothing hears so once, and nobody else does."""

from __future__ import annotations

PROGRAM = """
import warnings, torch, bagua.torch as bagua
from bagua.torch import alone

def told(case):
    alone.somebody_wrapped()  # the end of the case before
    alone._watch = None
    alone.begin()
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    if case == "wrapped":
        other = torch.nn.Parameter(torch.ones(2))
        bagua.DistributedOptimizer(torch.optim.SGD([other], lr=1), algorithm="local_sgd")
    if case == "by torch":
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if case == "broadcast":
        bagua.broadcast_parameters({"param": param}, root_rank=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(50):
            param.grad = torch.ones_like(param)
            if case == "gradients by hand":
                bagua.allreduce_(param.grad)
            if case == "weights by hand" and step % 10 == 0:
                bagua.allreduce_(param.data)
            optimizer.step()
    if case == "by torch":
        torch.distributed.destroy_process_group()
    return [str(each.message).split()[0] for each in caught if "of its own" in str(each.message)]

bagua.init()
for case in ("nothing", "broadcast", "gradients by hand", "weights by hand", "by torch",
             "wrapped"):
    print(case, *told(case))
"""

TO_THE_FIRST = "nothing SGD\nbroadcast SGD\ngradients by hand\nweights by hand\nby torch\nwrapped\n"


def test_the_first_rank_hears_so(run_ranks):
    result = run_ranks(2, PROGRAM)
    assert result.exit_code == 0, str(result)
    assert result.stdout == [TO_THE_FIRST, TO_THE_FIRST.replace(" SGD", "")], str(result)


def test_a_single_rank_has_nobody_to_talk_to(run_ranks):
    result = run_ranks(1, PROGRAM)
    assert result.exit_code == 0, str(result)
    assert "SGD" not in result.stdout[0]
