"""Python objects between ranks."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.fixture(scope="session")
def bagua():
    import bagua

    bagua.init()
    return bagua


class Unpicklable:
    def __reduce__(self):
        raise TypeError("a lock is inside")


OBJECTS = [None, 0, "", "ü" * 1000, {"a": [1, (2.5, None)]}, b"\0" * 70000, range(5)]


def test_broadcast_object(bagua):
    for root in range(bagua.size()):
        for obj in OBJECTS:
            # None on the others is what everybody writes
            mine = obj if bagua.rank() == root else None
            result = bagua.broadcast_object(mine, root, name="object")
            assert result == obj
            assert type(result) is type(obj)
            assert bagua.broadcast_object(mine, root) == obj
    assert bagua.broadcast_object_fn(root_rank=0, name="fn")(bagua.rank()) == 0


def test_the_root_keeps_its_own_object(bagua):
    mine = {"array": np.ones(3)}
    result = bagua.broadcast_object(mine, 0)
    assert (result is mine) == (bagua.rank() == 0)
    result["array"] += 1  # what was received can be written to


def test_allgather_object(bagua):
    ranks = range(bagua.size())
    assert bagua.allgather_object(bagua.rank()) == list(ranks)
    mine = OBJECTS[bagua.rank()] if bagua.rank() < 2 else "x" * 100000
    expected = [OBJECTS[r] if r < 2 else "x" * 100000 for r in ranks]
    assert bagua.allgather_object(mine, name="objects") == expected


def test_what_cannot_be_pickled_is_an_error_on_every_rank(bagua):
    last = bagua.size() - 1
    obj = Unpicklable() if bagua.rank() == last else 1
    with pytest.raises(bagua.UsageError, match=f"rank {last} cannot be pickled"):
        bagua.broadcast_object(obj, last)
    with pytest.raises(bagua.UsageError, match=f"rank {last} cannot be pickled"):
        bagua.allgather_object(obj)
    assert bagua.allgather_object(7) == [7] * bagua.size()


def test_a_root_that_does_not_exist(bagua):
    with pytest.raises(bagua.UsageError, match="root 9"):
        bagua.broadcast_object(1, 9)


def test_the_engine_does_not_remember_every_size(bagua):
    """Few distinct shapes, however many distinct sizes."""
    for size in range(1000, 1100):
        assert len(bagua.broadcast_object(b"x" * size, 0)) == size
