"""Told before anything of bagua is imported, which keeps MPI from starting by itself."""

import os


def has_own() -> bool:
    """Whether each rank has a GPU of its own."""
    return os.environ.get("OWN_GPU") == "1"
