"""Which collective is used: told once, and as the user wants it."""

from __future__ import annotations

import pytest

PROGRAM = """
import sys
import bagua, numpy
bagua.init(log_level="info", allreduce=sys.argv[1])
for count in (200_000, 300_000) * 3:
    total = bagua.allreduce(numpy.full(count, bagua.rank() + 1.0), op=bagua.Sum)
    assert (total == sum(range(1, bagua.size() + 1))).all()
"""


@pytest.mark.parametrize(
    ("wanted", "used"),
    [("auto", "shared"), ("ring", "ring"), ("hierarchical+halving", "hierarchical")],
)
def test_is_told_once(run_ranks, wanted, used):
    result = run_ranks(2, PROGRAM, wanted)
    assert result.exit_code == 0, result
    for text in result.stderr:
        told = [line for line in text.splitlines() if "allreduce over 2 ranks uses" in line]
        assert [line.partition(" uses ")[2] for line in told] == [used], text


def test_leaders_are_told_of_by_name(run_ranks):
    result = run_ranks(1, 'import bagua\nbagua.init(allreduce="hierarchical+rings")')
    assert result.exit_code != 0
    assert "hierarchical+ring" in result.stderr[0], result
