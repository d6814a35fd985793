"""What every rank has."""

from __future__ import annotations

import pytest
from common import everyone as fixtures
from common.everyone import FAMILIES

hvd, everyone = fixtures.hvd, fixtures.everyone


def pytest_collection_modifyitems(items):
    """Three ranks exchange everything by messages, other numbers of them by shared memory."""
    for item in items:
        if "/tests/torch/" not in item.path.as_posix() or not hasattr(item, "callspec"):
            continue
        if item.callspec.params.get("ranks") == 3 and "on_one_machine" not in item.name:
            item.add_marker(pytest.mark.rank_env(BAGUA_TRANSPORT="mpi"))


@pytest.fixture(params=list(FAMILIES))
def dtypes(request):
    """Element types of one family; the last one printed is the one that failed."""

    def each():
        for dtype in FAMILIES[request.param]:
            print(dtype)
            yield dtype

    return each()


@pytest.fixture
def own_compression(hvd):
    """A user's own, with which gradients travel alone; it changes nothing."""

    class Own(hvd.Compressor):
        compress = staticmethod(lambda tensor: (tensor, None))
        decompress = staticmethod(lambda tensor, _: tensor)

    return Own


@pytest.fixture(params=[True, False], ids=["during backward", "after backward"])
def overlap(request, monkeypatch, hvd):
    """When buckets leave, which otherwise depends on the machine."""
    from bagua.common.world import world  # MPI has begun by now

    monkeypatch.setattr(world(), "overlaps", lambda busy_threads: request.param)
    return request.param
