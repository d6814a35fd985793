"""What `python -m benchmarks` measures, and the plot that it draws."""

from __future__ import annotations

import sys

import pytest

from benchmarks import __main__ as program
from benchmarks import codecs, one_node, sweeps


@pytest.fixture
def asked(monkeypatch):
    """What is asked of others, instead of a measurement."""
    asked = []
    monkeypatch.setattr(codecs, "run", lambda *_: asked.append("codecs"))
    monkeypatch.setattr(sweeps, "run", lambda sweep, nps, *_: asked.append((sweep, *nps)))
    monkeypatch.setattr(program, "on_ranks", lambda np, *words: asked.append((np, *words)) or 0)
    return asked


def test_the_plain_command_measures_everything(asked, monkeypatch, tmp_path):
    output = str(tmp_path / "one_node.json")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--output", output])
    assert program.main() == 0
    codec, ranks, sizes, threads = asked
    assert (codec, sizes) == ("codecs", ("sizes", 2))
    assert ranks[:2] == (2, "benchmarks")
    assert set(one_node.CASES) <= set(ranks)
    assert threads[:2] == (2, "benchmarks.threads")


def test_cases_can_be_chosen(asked, monkeypatch, tmp_path):
    output = str(tmp_path / "one_node.json")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "sizes", "-np", "3", "--output", output])
    assert program.main() == 0
    assert asked == [("sizes", 3)]


def test_a_table_tells_bytes_touched_of_those_that_are_known():
    figures = {"median_s": 2e-3, "min_s": 1e-3, "rounds": 1}
    case = {"bagua": {**figures, "touched_per_byte": 4.0}, "gloo": {**figures, "median_s": 4e-3}}
    head, ours, gloo, *_ = program.table({"megabyte": case}).splitlines()
    assert "touched" in head
    assert ours.split() == ["megabyte", "bagua", "2.00", "ms", "1.00", "ms", "4.00"]
    assert gloo.split()[2:] == ["4.00", "ms", "1.00", "ms", "2.00", "x", "bagua's"]


def test_a_plot_has_every_system_on_logarithmic_axes(monkeypatch, tmp_path):
    from matplotlib import pyplot

    row = {"bagua": 1e-3, "bagua arena": 5e-4, "gloo": 1e-2, "memcpy": 2e-4}
    figures = {str(nbytes): row for nbytes in sweeps.SIZES}
    sweeps.plot(figures, "title", tmp_path / "sizes.png")
    axes = pyplot.gcf().axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [line.get_label() for line in axes.lines] == list(row)
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")
    pyplot.close("all")
