"""What `import bagua.torch as hvd` offers, and what it says before `init`."""

from __future__ import annotations

import pytest
import torch

BEFORE_INIT = """
import torch
import bagua.torch as hvd

sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
calls = {
    "rank": hvd.rank, "size": hvd.size, "local_rank": hvd.local_rank, "barrier": hvd.barrier,
    "join": hvd.join, "mpi_threads_supported": hvd.mpi_threads_supported,
    "allreduce": lambda: hvd.allreduce(torch.ones(2)),
    "allreduce_": lambda: hvd.allreduce_(torch.ones(2)),
    "allgather": lambda: hvd.allgather(torch.ones(2)),
    "broadcast": lambda: hvd.broadcast(torch.ones(2), 0),
    "alltoall": lambda: hvd.alltoall(torch.ones(2)),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(2)),
    "sparse": lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "a"),
    "broadcast_object": lambda: hvd.broadcast_object(1),
    "allgather_object": lambda: hvd.allgather_object(1),
    "broadcast_parameters": lambda: hvd.broadcast_parameters({"a": torch.ones(1)}, 0),
    "add_process_set": lambda: hvd.add_process_set([0]),
    "SyncBatchNorm": lambda: hvd.SyncBatchNorm(2)(torch.ones(3, 2)),
    "DistributedOptimizer": lambda: hvd.DistributedOptimizer(sgd),
    "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(sgd),
    "global_process_set": hvd.global_process_set.size,
}
def check():
    assert not hvd.is_initialized()
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said = str(error)
            assert said == "bagua is not initialized; call init() first", (name, said)
        else:
            raise AssertionError(name)
check()
hvd.init()
assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1]
hvd.shutdown()
check()
hvd.init()
assert hvd.allreduce(torch.ones(2), name="again").tolist() == [1, 1]
print("all well")
"""


def test_everything_asks_for_init_first(run_ranks):
    result = run_ranks(1, BEFORE_INIT)
    assert result.stdout[0].strip() == "all well", str(result)
    assert result.exit_code == 0


NAMES = """
init shutdown is_initialized rank size local_rank local_size cross_rank cross_size is_homogeneous
mpi_threads_supported mpi_built mpi_enabled nccl_built cuda_built gloo_built gloo_enabled ccl_built
ddl_built rocm_built
allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_
grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async
allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_ broadcast_async broadcast_async_ alltoall alltoall_async
reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
barrier join poll synchronize Average Sum Adasum Min Max Product
ProcessSet add_process_set remove_process_set global_process_set
DistributedOptimizer broadcast_parameters broadcast_optimizer_state broadcast_object
broadcast_object_fn allgather_object Compression SyncBatchNorm HorovodInternalError
"""


@pytest.mark.ranks(2)
def test_names(hvd):
    assert [name for name in NAMES.split() if not hasattr(hvd, name)] == []
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []


@pytest.mark.ranks(2)
def test_absent_names_say_what_to_do_instead(hvd):
    for name, words in {
        "elastic": "save checkpoints",
        "run": "bagua-run -np",
        "start_timeline": "no timeline yet",
        "check_extension": "leave it out",
    }.items():
        with pytest.raises(AttributeError, match=f"bagua.torch has no {name}: .*{words}"):
            getattr(hvd, name)
        assert not hasattr(hvd, name)
    with pytest.raises(AttributeError, match=r"'bagua\.torch' has no attribute 'alreduce'"):
        _ = hvd.alreduce


def test_what_was_built_is_told_as_it_is(hvd):
    from bagua.common.core import core

    info = core.build_info()
    assert hvd.mpi_built()
    assert hvd.mpi_enabled()
    assert hvd.nccl_built() == (info["nccl"] != "not built")
    assert hvd.cuda_built() == (info["cuda"] != "not built")
    for absent in ("gloo_built", "gloo_enabled", "ccl_built", "ddl_built", "rocm_built"):
        assert getattr(hvd, absent)() is False


@pytest.mark.ranks(2)
def test_the_error_of_horovods_name_catches_all_of_ours(hvd):
    for error in (hvd.UsageError, hvd.PeerError, hvd.InternalError):
        assert issubclass(error, hvd.HorovodInternalError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert hvd.exceptions.HorovodInternalError is hvd.HorovodInternalError


@pytest.mark.ranks(2)
def test_numpys_operations_take_torch_tensors_by_dlpack(everyone):
    import bagua

    tensor = torch.full((2, 3), float(everyone.me))
    assert bagua.allreduce_(tensor, op=bagua.Max) is tensor
    assert (tensor == everyone.size - 1).all()
