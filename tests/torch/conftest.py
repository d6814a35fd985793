"""What every rank has."""

from __future__ import annotations

import pytest
from common import everyone as fixtures
from common.everyone import FAMILIES

hvd, everyone = fixtures.hvd, fixtures.everyone


@pytest.fixture(params=list(FAMILIES))
def dtypes(request):
    """Element types of one family; the last one printed is the one that failed."""

    def each():
        for dtype in FAMILIES[request.param]:
            print(dtype)
            yield dtype

    return each()
