"""Warnings that name the user's line, however deep in this package they arise."""

from __future__ import annotations

import sys
import warnings

# What a warning passes on its way up: this package, and autograd, which calls it back.
_PASSED = ("bagua", "torch")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, level)
