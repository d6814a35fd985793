"""Which way tensors go: make test-gpu runs this both without NCCL and with it."""

import warnings

import pytest
import torch

from bagua.algorithms import find
from bagua.common.config import nccl_shares_gpu
from gpu.sharing import has_nccl, missing
from gpu.test_training import trained

pytestmark = pytest.mark.ranks(1, 2)


def test_what_was_asked_for_is_there(hvd):
    if nccl_shares_gpu():
        assert missing() is None, missing()


def test_the_host_touches_nothing_that_goes_by_nccl_or_stays_where_it_is(hvd):
    values = torch.ones(1_000_000, device="cuda")
    hvd.allreduce_(values, name="values", op=hvd.Average)  # they find out which way
    before = hvd.counters()["touched_nbytes"]
    hvd.allreduce_(values, name="values", op=hvd.Average)
    touched = hvd.counters()["touched_nbytes"] - before
    assert (values == 1).all()
    assert (touched < values.nbytes) == (hvd.size() == 1 or has_nccl(hvd))


@pytest.mark.rank_env(BAGUA_NCCL_REGISTER="1")
def test_in_registered_memory(hvd):
    """Where NCCL is used at all."""
    algorithm = find("gradient_allreduce")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "nccl_register has no effect")
        on_gpu = trained(hvd, algorithm, "cuda")
    torch.testing.assert_close(on_gpu, trained(hvd, algorithm, "cpu"), rtol=1e-5, atol=1e-5)
    for theirs in hvd.allgather_object(on_gpu):
        assert torch.equal(theirs, on_gpu)
