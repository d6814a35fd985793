"""What papers and other libraries call something that is given as another argument here."""

from __future__ import annotations

# What is an argument of its own, and no codec.
_NO_CODECS = {"lowrank": "low_rank=2", "powersgd": "low_rank=2"}


def instead_of_codec(name: str) -> str:
    """What is given in place of `codec=`; empty if that is not known."""
    return _NO_CODECS.get(name.lower().replace("_", ""), "")
