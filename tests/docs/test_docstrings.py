"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for layer in ("common", "algorithms", "torch_api")
    for path in sorted((ROOT / "bagua" / layer).rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.ranks(1)  # they import MPI, which the main process must not
@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module, monkeypatch):
    from bagua.algorithms import algorithm

    monkeypatch.setattr(algorithm, "_REGISTRY", dict(algorithm._REGISTRY))
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_some_modules_have_examples():
    assert "bagua.algorithms.algorithm" in MODULES
