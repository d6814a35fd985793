"""Takes Markdown files apart: fenced blocks, hidden preludes, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

_FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_PRELUDE = re.compile(r"^<!-- prelude\n(?P<body>.*?)^-->$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block. Its info string is a language and marks: `python raises=UsageError`."""

    path: Path
    line: int  # of its first line of code, from 1
    language: str
    marks: dict[str, str] = field(hash=False)
    body: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = []
    for match in _FENCE.finditer(text):
        language, *words = match["info"].split() or [""]
        marks = dict(word.partition("=")[::2] for word in words)
        line = text.count("\n", 0, match.start("body")) + 1
        found.append(Block(path, line, language, marks, match["body"]))
    return found


def prelude(path: Path) -> str:
    """What a file's comment `<!-- prelude … -->` runs before each of its Python blocks."""
    match = _PRELUDE.search(path.read_text())
    return match["body"] if match else ""


def prose(path: Path) -> str:
    return _FENCE.sub("", path.read_text())


def links(path: Path) -> list[str]:
    return _LINK.findall(prose(path))


def anchors(path: Path) -> set[str]:
    """The names by which GitHub lets one link to the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def tables(path: Path) -> list[list[str]]:
    """The cells of every row of every table, headers included."""
    rows = re.findall(r"^\|(.*)\|$", prose(path), re.MULTILINE)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
    return [row for row in cells if set("".join(row)) - set("-: ")]


def both_sides(diff: str) -> tuple[str, str]:
    """The program before and after a diff."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] or "\n" for line in lines if not line.startswith("+"))
    after = "".join(line[1:] or "\n" for line in lines if not line.startswith("-"))
    return before, after
