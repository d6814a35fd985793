"""Flags from a file: `fusion-mb: 32` says --fusion-mb 32."""

from __future__ import annotations

import difflib
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from bagua.common.config import nearest
from bagua.common.errors import UsageError

# Entries whose flag is not called after section and entry. A section that is switched off says no
# more than that: horovodrun does not look at its other entries either.
_RENAMED = {
    "logging-level": "log-level",
    "logging-with-timestamp": "log-with-timestamp",
    "logging-hide-timestamp": "log-hide-timestamp",
    "library-options-ccl-bgt-affinity": "thread-affinity",
    "library-options-mlsl-bgt-affinity": "thread-affinity",
}
_SWITCHED = {"stall-check": True, "autotune": False}  # section: whether it is on unless it says


def read_flags(path: str, known: Sequence[str]) -> list[str]:
    """The file as words of a command line.

    Underscores serve as dashes. A section's name may be part of the flag's, as in
    `stall-check: {warning-time-seconds: 60}`, or a mere heading, as in `tuning: {fusion-mb: 32}`.
    The sections of horovodrun's files are such; its features that are not here are refused by
    their flags.
    """
    source = f"--config-file {path}"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not text in UTF-8, at byte {error.start}") from None
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
        return _section(dashed, value, known, source)
    if value is None:  # an entry or a section left empty
        return []
    if dashed == "controller":
        if value not in ("mpi", "gloo"):
            raise UsageError(f"{source}: controller: {value!r} is neither 'mpi' nor 'gloo'")
        return [f"--{value}"]
    flag = next((f for f in (f"--{dashed}", f"-{dashed}") if f in known), "")
    if not flag:
        raise UsageError(f"{source}: unknown flag {name!r}{nearest('--' + dashed, known)}")
    if value is True:
        return [flag]
    if value is False:
        no = "--no-" + dashed
        return [no] if no in known else []
    values = value if isinstance(value, list) else [value]
    return [f"{flag}={json.dumps(item) if isinstance(item, dict) else item}" for item in values]


def _section(
    section: str, entries: Mapping[Any, Any], known: Sequence[str], source: str
) -> list[str]:
    entries = {str(key).replace("_", "-"): value for key, value in entries.items()}
    if section in _SWITCHED:
        enabled = entries.pop("enabled", _SWITCHED[section])
        if not isinstance(enabled, bool):
            raise UsageError(f"{source}: {section}: enabled: want true or false, not {enabled!r}")
        if not enabled:
            return [f"--no-{section}"]
        entries = {"enabled": enabled, **entries}
    words: list[str] = []
    for key, value in entries.items():
        joined = _RENAMED.get(f"{section}-{key}", f"{section}-{key}")
        if key == "enabled" and section in _SWITCHED:
            joined = section
        name = next((n for n in (joined, key) if f"--{n}" in known or f"-{n}" in known), "")
        if not name and not isinstance(value, Mapping):
            raise UsageError(
                f"{source}: section {section!r} has an entry {key!r}, and there is no flag"
                f" --{joined} or --{key}{_near(section, key, known)}"
            )
        words += _words(name or key, value, known, source)
    return words


def _near(section: str, key: str, known: Sequence[str]) -> str:
    """A hint at an entry of that section, or at a flag that is the entry but for a typing error."""
    names = [*(flag[2:] for flag in known), *_RENAMED, *(f"{name}-enabled" for name in _SWITCHED)]
    own = [name[len(section) + 1 :] for name in names if name.startswith(f"{section}-")]
    flags = difflib.get_close_matches(f"--{key}", known, n=1, cutoff=0.8)
    return nearest(key, own) or (f"; did you mean {flags[0]!r}?" if flags else "")
