"""Bytes touched for each byte reduced, as docs/design.md counts them."""

from __future__ import annotations

import pytest
import torch


def nothing() -> None:
    pass


@pytest.mark.ranks(2, 3)
def test_touched_bytes_are_those_of_the_design(hvd):
    from benchmarks.one_node import latency, many, vector
    from benchmarks.peers import Bagua

    peers, n = {"bagua": Bagua()}, hvd.size()
    figures = vector(peers, 1 << 18, 1, hvd.barrier)
    touched = {name: figure["touched_per_byte"] for name, figure in figures.items()}
    assert touched == pytest.approx({"bagua": 5 - 2 / n, "bagua arena": 2, "memcpy": 2}, rel=1e-3)
    arena, before = hvd.empty_shared(1 << 18), hvd.counters()["touched_nbytes"]
    hvd.allreduce(arena, name="elsewhere")
    touched_nbytes = hvd.counters()["touched_nbytes"] - before
    assert touched_nbytes == pytest.approx(3 * arena.nbytes, rel=1e-3)
    before = hvd.counters()["touched_nbytes"]
    hvd.allreduce_(arena, op=hvd.Max, prescale_factor=2.0, name="scaled")
    touched_nbytes = hvd.counters()["touched_nbytes"] - before
    assert touched_nbytes == pytest.approx(4 * arena.nbytes, rel=1e-3)
    one = latency(peers, hvd.barrier, quick=True)
    assert one["bagua"]["touched_per_byte"] == n + 3
    small = many(peers, hvd.barrier, quick=True)
    assert small["bagua"]["touched_per_byte"] == pytest.approx(5 - 2 / n, rel=1e-2)


@pytest.mark.ranks(2)
def test_a_step_is_told_its_gradients(hvd):
    from benchmarks.one_node import trained
    from benchmarks.peers import Bagua

    def model() -> torch.nn.Module:
        return torch.nn.Linear(512, 512, bias=False)

    figures = trained({"bagua": Bagua()}, model, torch.ones(4, 512), 1, hvd.barrier)
    assert 2 <= figures["bagua"]["touched_per_byte"] <= 4.1
