"""Which way tensors go: make test-gpu runs this both without NCCL for two ranks and with it."""

import pytest
import torch

from bagua.common.config import nccl_shares_gpu
from gpu.sharing import has_nccl, missing

pytestmark = pytest.mark.ranks(1, 2)


def test_what_was_asked_for_is_there(hvd):
    if nccl_shares_gpu():
        assert missing() is None, missing()


def test_the_host_touches_nothing_that_goes_by_nccl(hvd):
    values = torch.ones(1_000_000, device="cuda")
    hvd.allreduce_(values, name="values", op=hvd.Average)  # they find out which way
    before = hvd.counters()["touched_nbytes"]
    hvd.allreduce_(values, name="values", op=hvd.Average)
    touched = hvd.counters()["touched_nbytes"] - before
    assert (values == 1).all()
    assert (touched < values.nbytes) == has_nccl(hvd)
