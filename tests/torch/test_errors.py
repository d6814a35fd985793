"""Bad input is a clear error on every rank, and the engine goes on working."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bagua.common.core import core
from bagua.common.world import world
from bagua.torch import arrays
from bagua.torch.checks import check_parameters

pytestmark = pytest.mark.ranks(2, 3)


def still_works(hvd, name):
    assert hvd.allreduce(torch.ones(3), name=name, op=hvd.Sum).tolist() == [hvd.size()] * 3


def odd_one_out(everyone, usual, odd):
    """The last rank calls something else than the others."""
    return odd if everyone.me == everyone.size - 1 else usual


MISMATCHES = {
    "dtype": ("allreduce", {}, torch.float64, "dtype"),
    "shape": ("allreduce", {}, None, "shape"),
    "op": ("allreduce", {"op": 4}, torch.float32, "op"),
    "prescale": ("allreduce", {"prescale_factor": 2.0}, torch.float32, "prescale_factor"),
    "postscale": ("allreduce", {"postscale_factor": 2.0}, torch.float32, "postscale_factor"),
    "kind": ("allgather", {}, torch.float32, "allgather"),
}


@pytest.mark.parametrize("case", list(MISMATCHES))
def test_mismatch(everyone, hvd, case):
    kind, keywords, dtype, text = MISMATCHES[case]
    name = f"mismatch.{case}"
    odd = torch.ones(4 if dtype is None else 3, dtype=dtype or torch.float32)
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match=text) as caught:
            odd_one_out(
                everyone,
                lambda: hvd.allreduce(torch.ones(3), name=name),
                lambda: getattr(hvd, kind)(odd, name=name, **keywords),
            )()
        assert name in str(caught.value)
        assert isinstance(caught.value, RuntimeError)
        still_works(hvd, name)


WRONG = {
    "name": ({"name": 5}, "a name is a str, not int"),
    "process set": ({"process_set": 0}, "process_set=0 is none"),
    "no process set": ({"process_set": None}, "process_set=None is none"),
}
CALLS = {
    "allreduce": lambda hvd, **keywords: hvd.allreduce(torch.ones(3), **keywords),
    "allreduce_": lambda hvd, **keywords: hvd.allreduce_(torch.ones(3), **keywords),
    "allgather": lambda hvd, **keywords: hvd.allgather(torch.ones(3), **keywords),
    "broadcast": lambda hvd, **keywords: hvd.broadcast(torch.ones(3), 0, **keywords),
    "alltoall": lambda hvd, **keywords: hvd.alltoall(torch.ones(6), **keywords),
    "reducescatter": lambda hvd, **keywords: hvd.reducescatter(torch.ones(3), **keywords),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_of_another_kind(hvd, what):
    keywords, words = WRONG[what]
    for call in CALLS.values():
        with pytest.raises(hvd.UsageError, match=words):
            call(hvd, **keywords)
    if "set" in what:
        for call in (hvd.barrier, hvd.join, hvd.remove_process_set):
            with pytest.raises(hvd.UsageError, match="process_set="):
                call(process_set=keywords["process_set"])
    still_works(hvd, f"{what} of another kind")


def test_values_of_another_kind(hvd):
    with pytest.raises(hvd.UsageError, match=r"compression='fp16' .* Compression\.fp16"):
        hvd.allreduce(torch.ones(3), compression="fp16")
    with pytest.raises(AttributeError, match=r"there are none, fp16.* mean 'minmax_u8'\?"):
        hvd.allreduce(torch.ones(3), compression=hvd.Compression.minmax_u9)
    with pytest.raises(hvd.UsageError, match="op='sum' is no reduction"):
        hvd.allreduce(torch.ones(3), op="sum")
    with pytest.raises(hvd.UsageError, match="root_rank='first' is no rank"):
        hvd.broadcast(torch.ones(3), "first")
    with pytest.raises(hvd.UsageError, match=r"one whole number for each rank"):
        hvd.alltoall(torch.ones(3), splits=[1.5] * hvd.size())
    for ranks in ([0.5], "ab", 3):
        with pytest.raises(hvd.UsageError, match="is made of ranks"):
            hvd.ProcessSet(ranks)
    for call in (hvd.poll, hvd.synchronize):
        with pytest.raises(hvd.UsageError, match="what an _async operation returned"):
            call(3)
    with pytest.raises(AttributeError, match="there are none, fp16, bf16, minmax_u8, "):
        _ = hvd.Compression.fp8


def test_scales_that_are_no_finite_numbers(hvd):
    for scales in ({"postscale_factor": math.nan}, {"prescale_factor": -math.inf}):
        ((what, factor),) = scales.items()
        for tensor in (torch.ones(3, dtype=torch.int32), torch.ones(3)):
            for call in (hvd.allreduce, hvd.allreduce_, hvd.reducescatter):
                with pytest.raises(hvd.UsageError, match=f"{what}={factor} is no finite number"):
                    call(tensor, op=hvd.Sum, **scales)
    with pytest.raises(hvd.UsageError, match="prescale_factor times postscale_factor is no finite"):
        hvd.allreduce(torch.ones(3), prescale_factor=1e300, postscale_factor=1e300)
    still_works(hvd, "scales")


@pytest.mark.skipif(not hasattr(torch.ones(1), "grad_dtype"), reason="an older torch")
def test_gradients_of_another_type(everyone, hvd):
    """On one rank, which the others hear."""
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    sgd = torch.optim.SGD([param], lr=0.1)
    param.grad_dtype = odd_one_out(everyone, torch.bfloat16, torch.float32)
    with pytest.raises(
        hvd.UsageError, match=r"weight is bfloat16 and its grad_dtype float32.*autoc"
    ):
        hvd.DistributedOptimizer(sgd, [("weight", param)])
    param.grad_dtype = None  # whatever autograd makes, which is the parameter's
    hvd.DistributedOptimizer(sgd, [("weight", param)])
    param.sum().backward()
    assert param.grad.tolist() == [1, 1, 1]


def test_different_roots(everyone, hvd):
    with pytest.raises(hvd.HorovodInternalError, match="root"):
        hvd.broadcast(torch.ones(3), odd_one_out(everyone, 0, 1), name="roots")
    still_works(hvd, "roots")


def test_different_row_shapes_in_an_allgather(everyone, hvd):
    with pytest.raises(hvd.HorovodInternalError, match="shape"):
        hvd.allgather(torch.ones(2, odd_one_out(everyone, 3, 4)), name="rows")
    still_works(hvd, "rows")


def test_different_groups(everyone, hvd):
    tensors = [torch.ones(3)] * odd_one_out(everyone, 2, 3)
    with pytest.raises(hvd.HorovodInternalError, match="number of tensors"):
        hvd.grouped_allreduce(tensors, name="groups")
    still_works(hvd, "groups")


def test_unnamed_mismatch(everyone, hvd):
    with pytest.raises(hvd.exceptions.HorovodInternalError, match="shape"):
        hvd.allreduce(torch.ones(odd_one_out(everyone, 3, 5)))
    still_works(hvd, None)


def test_root_out_of_range(everyone, hvd):
    for root in (-1, everyone.size, 2**32, 2**32 + 1, -(2**32), 2**70):
        with pytest.raises(ValueError, match=f"root {root}"):
            hvd.broadcast(torch.ones(3), root, name="root")
        with pytest.raises(ValueError, match=f"root {root}"):
            hvd.broadcast(torch.ones(3), odd_one_out(everyone, 0, root), name="root")
    still_works(hvd, "root")


def test_what_is_refused_on_one_rank_is_told_to_the_others(everyone, hvd):
    rows = odd_one_out(everyone, everyone.size, everyone.size + 1)
    with pytest.raises(hvd.HorovodInternalError, match="split"):
        hvd.alltoall(torch.ones(rows), name="uneven")
    still_works(hvd, "uneven")
    splits = odd_one_out(everyone, [1] * everyone.size, [2] * everyone.size)
    with pytest.raises(hvd.HorovodInternalError, match="split"):
        hvd.alltoall(torch.ones(everyone.size), splits, name="splits")
    still_works(hvd, "splits")


UNREADABLE = {
    "op": lambda hvd: hvd.allreduce(torch.ones(3), op=77),
    "op in place": lambda hvd: hvd.allreduce_(torch.ones(3), op="most"),
    "prescale_factor": lambda hvd: hvd.allreduce(torch.ones(3), prescale_factor="x"),
    "infinite": lambda hvd: hvd.allreduce_(torch.ones(3), prescale_factor=math.inf),
    "root_rank": lambda hvd: hvd.broadcast(torch.ones(3), None),
    "op of rows": lambda hvd: hvd.reducescatter(torch.ones(8), op=77),
    "nested": lambda hvd: hvd.allreduce(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("call", UNREADABLE.values(), ids=UNREADABLE)
def test_arguments_of_one_rank_that_cannot_be_read(everyone, hvd, call):
    """The others hear of it, so that requests without a name go on meeting each other."""
    if everyone.me > 0:
        call = {
            UNREADABLE["root_rank"]: lambda hvd: hvd.broadcast(torch.ones(3), 0),
            UNREADABLE["op of rows"]: lambda hvd: hvd.reducescatter(torch.ones(8)),
        }.get(call, lambda hvd: hvd.allreduce(torch.ones(3)))
    with pytest.raises(hvd.UsageError):
        call(hvd)
    for value in range(3):
        assert hvd.allreduce(torch.tensor([float(value)])).item() == value


def test_reductions_of_other_libraries_are_taken_by_their_meaning(everyone, hvd):
    import torch.distributed as dist

    import bagua.torch_api

    mine, size = torch.tensor([2.0 + everyone.me]), everyone.size
    everything = [2.0 + rank for rank in range(size)]
    right = {
        "SUM": sum(everything),
        "AVG": sum(everything) / size,
        "MIN": min(everything),
        "MAX": max(everything),
        "PRODUCT": float(torch.tensor(everything).prod()),
    }
    for ops in (dist.ReduceOp, bagua.torch_api.ReduceOp):
        for name, value in right.items():
            assert hvd.allreduce(mine, op=getattr(ops, name)).item() == pytest.approx(value)
        with pytest.raises(hvd.UsageError, match="no reduction"):
            hvd.allreduce(mine, op=ops.BOR)
    with pytest.raises(hvd.UsageError, match="no reduction"):
        hvd.allreduce(mine, op=True)


@pytest.mark.parametrize("splits", [[1], [-1, 4, 1], [2, 2, 2, 2, 2]])
def test_splits_that_do_not_fit(everyone, hvd, splits):
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(4), splits, name="unfit")
    still_works(hvd, "unfit")


def test_reductions_without_a_meaning(everyone, hvd):
    for tensor, op in (
        (torch.ones(3, dtype=torch.complex64), hvd.Max),
        (torch.ones(3, dtype=torch.bool), hvd.Average),
        (torch.ones(3, dtype=torch.int32), hvd.Adasum),
    ):
        with pytest.raises(ValueError, match=r"no meaning|floating-point"):
            hvd.allreduce(tensor, op=op, name="meaning")
    still_works(hvd, "meaning")


def test_tensors_that_cannot_be_exchanged(everyone, hvd):
    with pytest.raises(hvd.UsageError, match=r"not one on meta"):
        hvd.allreduce(torch.ones(3, device="meta"))
    with pytest.raises(hvd.UsageError, match=r"torch\.uint16 cannot be exchanged"):
        hvd.allreduce(torch.ones(3, dtype=torch.uint16))
    with pytest.raises(hvd.UsageError, match="sparse_allreduce_async"):
        hvd.allreduce(torch.eye(3).to_sparse())
    with pytest.raises(hvd.UsageError, match=r"a torch\.Tensor is needed, not list"):
        hvd.allgather([1.0, 2.0])
    still_works(hvd, None)


def test_duplicate_name_in_flight(everyone, hvd):
    if everyone.me > 0:
        hvd.barrier()  # the others come late, so that rank 0's is in flight
    handle = hvd.allreduce_async(torch.ones(3), name="twice")
    if everyone.me == 0:
        with pytest.raises(ValueError, match="'twice' is already in flight"):
            hvd.allreduce_async(torch.ones(3), name="twice")
        hvd.barrier()
    assert hvd.synchronize(handle).tolist() == [1.0] * 3
    still_works(hvd, "twice")


def test_a_handle_is_waited_for_once(everyone, hvd):
    handle = hvd.allreduce_async(torch.ones(3), name="once")
    hvd.synchronize(handle)
    with pytest.raises(ValueError, match="waited for already"):
        hvd.synchronize(handle)
    assert hvd.poll(handle)


def test_many_errors_in_flight_with_good_ones(everyone, hvd):
    handles = [
        hvd.allreduce_async(
            torch.ones(odd_one_out(everyone, 3, 3 + i % 2)), name=f"mixed.{i}", op=hvd.Sum
        )
        for i in range(10)
    ]
    for i, handle in enumerate(handles):
        if i % 2:
            with pytest.raises(hvd.HorovodInternalError, match=rf"mixed\.{i}"):
                hvd.synchronize(handle)
        else:
            assert hvd.synchronize(handle).tolist() == [everyone.size] * 3


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd"])
@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([(4, 8), (8, 2), (2, 1)], r"alone has 2\.weight, 2\.bias$"),
        ([(4, 9), (9, 2)], r"\('0\.weight', 'float32', \(8, 4\), .* and 2 more$"),
        ([(4, 8), (8, 2, False)], r"rank 0 alone has 1\.bias$"),
    ],
    ids=["one more", "shapes", "one less"],
)
def test_models_that_differ(everyone, hvd, layers, words, algorithm):
    sizes = odd_one_out(everyone, [(4, 8), (8, 2)], layers)
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hvd.UsageError, match="parameters differ between ranks: .*" + words):
        hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    still_works(hvd, "models differ")


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd"])
def test_parameters_that_are_added_and_differ(everyone, hvd, algorithm):
    """They stay refused, else each rank would train its own from then on."""
    layer = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=algorithm)
    added = torch.nn.Parameter(torch.ones(odd_one_out(everyone, 3, 4)))
    sgd.add_param_group({"params": [added]})
    for _ in range(2):
        with pytest.raises(hvd.UsageError, match=r"parameters differ between ranks: .*\(3,\)"):
            optimizer.zero_grad()
    still_works(hvd, "added")


def test_ranks_on_one_gpu(everyone, hvd, monkeypatch):
    """Each may have it by another number, or by the same number another one."""
    monkeypatch.setattr(arrays, "_host", 0)
    named = [*torch.nn.Linear(4, 2).named_parameters()]

    def check(gpu, name):
        monkeypatch.setattr(core, "device_identity", lambda number: b"%16d" % gpu)
        check_parameters(named, name, hvd.global_process_set)

    check(everyone.me, "own")
    last = everyone.size - 1
    with pytest.raises(hvd.UsageError, match=rf"ranks 0 and {last} train on one GPU, .*own-gpu"):
        check(odd_one_out(everyone, everyone.me, 0), "shared")
    monkeypatch.setattr(world(), "config", replace(world().config, allow_shared_gpu=True))
    check(0, "allowed")


@pytest.mark.parametrize("becomes", ["double", "wider"])
def test_a_model_that_is_converted_too_late(everyone, hvd, becomes):
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if becomes == "double":
        model.double()
    else:
        model.weight.data, model.bias.data = torch.ones(3, 4), torch.ones(3)
    loss = model(torch.ones(4, dtype=model.weight.dtype)).sum()
    with pytest.raises(hvd.UsageError, match=r"(weight|bias) was .* on cpu when Distr.* was made"):
        loss.backward()
    still_works(hvd, "converted")
