"""What every rank has."""

from __future__ import annotations

import pytest
from common.everyone import FAMILIES, Everyone


@pytest.fixture(scope="session")
def hvd():
    import bagua.torch

    bagua.torch.init()
    return bagua.torch


@pytest.fixture(scope="session")
def everyone(hvd) -> Everyone:
    return Everyone(hvd)


@pytest.fixture(params=list(FAMILIES))
def dtypes(request):
    """Element types of one family; the last one printed is the one that failed."""

    def each():
        for dtype in FAMILIES[request.param]:
            print(dtype)
            yield dtype

    return each()
