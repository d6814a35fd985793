"""What papers and other libraries call something that an algorithm here is given as an argument."""

from __future__ import annotations

from collections.abc import Iterable

from bagua.common.config import nearest

# By that name: the argument, and how it is written.
_ARGUMENTS = {
    "interval": ("every", "every=..."),
    "communication_interval": ("every", "every=..."),
    "sync_every": ("every", "every=..."),
    "overlap": ("when", "when='forward'"),
    "start_step": ("warmup_steps", "warmup_steps=..."),
    "start_powerSGD_iter": ("warmup_steps", "warmup_steps=..."),
    "rank": ("low_rank", "low_rank=..."),
    "matrix_approximation_rank": ("low_rank", "low_rank=..."),
    "ratio": ("density", "density=..."),
    "compress_ratio": ("density", "density=..."),
    "peer_selection_mode": ("peers", "peers=..."),
    "average": ("op", "op=bagua.Average or bagua.Sum"),
}

# What is an argument of its own, and no codec.
_NO_CODECS = {"lowrank": "low_rank=2", "powersgd": "low_rank=2"}


def here(name: str, known: Iterable[str]) -> str:
    """`; here that is x=...` for an argument of another name, else the nearest of those known."""
    known = list(known)
    argument, written = _ARGUMENTS.get(name, ("", ""))
    return f"; here that is {written}" if argument in known else nearest(name, known)


def instead_of_codec(name: str) -> str:
    """What is given in place of `codec=`; empty if that is not known."""
    return _NO_CODECS.get(name.lower().replace("_", ""), "")
