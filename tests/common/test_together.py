"""What fails on one rank is an error on all."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest

from bagua.common.together import gathered_if_any, refuse, together

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.fixture(scope="session")
def bagua():
    import bagua

    bagua.init()
    return bagua


class Held:
    pass


def fails(kind: type[Exception] | None, held: Held) -> None:
    with together("what they do", "task"):
        if kind:
            raise kind("no such file")


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_one_fails(bagua, kind):
    last, held = bagua.size() - 1, Held()
    mine = bagua.rank() == last
    words = (
        "^no such file$" if mine else rf"^what they do fails on rank {last}: {kind.__name__}: no"
    )
    with pytest.raises(kind if mine else bagua.UsageError, match=words):
        fails(kind if mine else None, held)
    fails(None, held)


def test_whoever_had_failed_is_let_go(bagua):
    held = Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            fails(OSError, held)
        del held
        assert gone() is None
    finally:
        gc.enable()


def test_it_costs_one_exchange_where_nothing_fails(bagua):
    before = bagua.counters()["exchanges"]
    fails(None, Held())
    assert bagua.counters()["exchanges"] == before + 1


@pytest.mark.ranks(2, 3)
def test_while_a_rank_has_joined(bagua):
    if bagua.rank() > 0:
        fails(None, Held())
        fails_here = bagua.rank() == bagua.size() - 1
        words = "no such file" if fails_here else "on a rank, which says why; others have joined"
        with pytest.raises(OSError if fails_here else bagua.UsageError, match=words):
            fails(OSError if fails_here else None, Held())
    bagua.join()


def test_what_ranks_have_to_say(bagua):
    assert gathered_if_any("nothing", False, "says") == []
    last = bagua.size() - 1
    assert gathered_if_any(bagua.rank(), bagua.rank() == last, "says") == list(range(bagua.size()))


@pytest.mark.ranks(2, 3)
def test_who_does_not_come_says_why(bagua):
    if bagua.rank() == 0:
        refuse("refused", bagua.global_process_set, "on purpose")
    else:
        with pytest.raises(bagua.UsageError, match="rank 0: on purpose"):
            gathered_if_any("something", True, "refused")
    assert gathered_if_any("nothing", False, "afterwards") == []
