"""Flags from a file: `fusion-mb: 32` says --fusion-mb 32."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from bagua.common.config import nearest
from bagua.common.errors import UsageError


def read_flags(path: str, known: Sequence[str]) -> list[str]:
    """The file as words of a command line.

    Underscores serve as dashes. A section's name may be part of the flag's, as in
    `stall-check: {warning-time-seconds: 60}`, or a mere heading, as in `tuning: {fusion-mb: 32}`.
    """
    source = f"--config-file {path}"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror}") from None
    entries = _load(text, os.path.splitext(path)[1].lower(), source)
    if not isinstance(entries, dict):
        raise UsageError(f"{source}: want 'flag: value' entries, found {type(entries).__name__}")
    return [
        word for name, value in entries.items() for word in _words(str(name), value, known, source)
    ]


def _load(text: str, suffix: str, source: str) -> Any:
    readers = {
        ".json": ("json", "", "loads"),
        ".toml": ("tomllib", "Python 3.11", "loads"),
        ".yaml": ("yaml", "pyyaml (pip install pyyaml)", "safe_load"),
        ".yml": ("yaml", "pyyaml (pip install pyyaml)", "safe_load"),
    }
    if suffix not in readers:
        raise UsageError(f"{source}: want a name ending in {', '.join(readers)}, not {suffix!r}")
    module, needs, function = readers[suffix]
    try:
        read = getattr(importlib.import_module(module), function)
    except ImportError:
        raise UsageError(f"{source}: reading {suffix} needs {needs}; .json always works") from None
    try:
        return read(text)
    except Exception as error:
        # The three readers share no class of error below this.
        raise UsageError(f"{source}: {error}") from None


def _words(name: str, value: Any, known: Sequence[str], source: str) -> list[str]:
    dashed = name.replace("_", "-")
    if isinstance(value, Mapping):
        words: list[str] = []
        for key, inner in value.items():
            joined = f"{dashed}-{key}".replace("_", "-")
            words += _words(joined if f"--{joined}" in known else str(key), inner, known, source)
        return words
    flag = next((f for f in (f"--{dashed}", f"-{dashed}") if f in known), "")
    if not flag:
        raise UsageError(f"{source}: unknown flag {name!r}{nearest('--' + dashed, known)}")
    if value is True:
        return [flag]
    if value is False or value is None:
        no = "--no-" + dashed
        return [no] if value is False and no in known else []
    values = value if isinstance(value, list) else [value]
    return [f"{flag}={json.dumps(item) if isinstance(item, dict) else item}" for item in values]
