"""Tests of what is done on a GPU, by one rank and by two that share it.

With OWN_GPU=1, each of the two has one of its own. Where there is no GPU they are skipped, and say
so; those that ask for `gpu`, the device, also run where one is pretended.
"""

import os

import pytest
import torch

from gpu.own import has_own


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        anywhere = os.environ.get("PRETEND_GPU") and "gpu" in getattr(item, "fixturenames", ())
        if "tests/gpu" in item.path.as_posix() and not anywhere:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def hvd():
    import bagua.torch

    # Where a GPU is pretended, tests that want none of this run in the same processes.
    shares = torch.cuda.is_available() and not has_own()
    bagua.torch.init(**({"allow_shared_gpu": True} if shares else {}))
    if has_own():
        torch.cuda.set_device(bagua.torch.local_rank())
    return bagua.torch


@pytest.fixture
def gpu():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
