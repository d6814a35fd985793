"""`join` where not every rank has something to train on together."""

from __future__ import annotations

import pytest

PROGRAM = """
import sys
import bagua

bagua.init(stall_fail_s=40)
if bagua.rank() == 0:
    import bagua.torch
if bagua.rank() == 2 and sys.argv[1:]:
    sys.exit()
print(bagua.join() in range(2 if sys.argv[1:] else 3), "torch" in sys.modules)
"""


@pytest.mark.parametrize("leaves", [[], ["leaves"]], ids=["all join", "one has shut down"])
def test_ranks_with_torch_and_without(run_ranks, leaves):
    result = run_ranks(3, PROGRAM, *leaves)
    assert result.exit_code == 0, str(result)
    last = "" if leaves else "True False\n"
    assert result.stdout == ["True True\n", "True False\n", last], str(result)
