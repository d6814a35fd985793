"""Where figures go, and what draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path("build/bench")


def find_pyplot() -> Any:
    """matplotlib's, without a screen; None, and a word about it, where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot without matplotlib: pip install matplotlib")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
