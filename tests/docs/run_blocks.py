"""Runs the Python blocks of one Markdown file; every rank is given this program.

Each block has a namespace of its own in which the file's prelude has run, but one marked
`continues` goes on in that of the block before. Marks: `raises=PeerError` on all ranks, or with
`rank=0` on that one; `only-compiles` for what must not be run here.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import Any

from document import Block, blocks, prelude


def run(block: Block, namespace: dict[str, Any]) -> str:
    """What is wrong with the block, if anything is."""
    # Empty lines before the code, so that a traceback has the line numbers of the document.
    code = compile("\n" * (block.line - 1) + block.body, str(block.path), "exec")
    if "only-compiles" in block.marks:
        return ""
    wanted = block.marks.get("raises", "")
    import bagua

    if "rank" in block.marks and int(block.marks["rank"]) != bagua.rank():
        wanted = ""
    try:
        exec(code, namespace)
    except Exception as error:
        if wanted in [cls.__name__ for cls in type(error).__mro__]:
            return ""
        return f"{block} should raise {wanted or 'nothing'}:\n{traceback.format_exc()}"
    return f"{block} should have raised {wanted}" if wanted else ""


def meet() -> None:
    """All ranks, without the engine: a block may have left one of them waiting in it."""
    from mpi4py import MPI

    arrival = MPI.COMM_WORLD.Ibarrier()
    while not arrival.Test():
        time.sleep(0.001)


def main(path: Path) -> None:
    before = compile(prelude(path), f"{path}: prelude", "exec")
    namespace: dict[str, Any] = {}
    troubles = []
    for block in blocks(path):
        if block.language != "python":
            continue
        if "continues" not in block.marks:
            namespace = {"__name__": "__main__"}
            exec(before, namespace)
        meet()
        trouble = run(block, namespace)
        meet()
        print(trouble or f"{block} ok", flush=True)
        if trouble:
            troubles.append(trouble)
    if troubles:
        sys.exit(f"{len(troubles)} blocks of {path} fail")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
