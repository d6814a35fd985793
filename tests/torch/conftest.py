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


@pytest.fixture(params=[True, False], ids=["during backward", "after backward"])
def overlap(request, monkeypatch, hvd):
    """When buckets leave, which otherwise depends on the machine."""
    from bagua.common.world import world  # MPI has begun by now

    monkeypatch.setattr(world(), "overlaps", lambda busy_threads: request.param)
    return request.param
