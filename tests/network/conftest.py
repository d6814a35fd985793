"""What every rank has."""

from __future__ import annotations

import socket

import pytest
from common import everyone as fixtures

hvd, everyone = fixtures.hvd, fixtures.everyone


@pytest.fixture(scope="session")
def hosts(hvd) -> list[list[int]]:
    """The ranks of each host."""
    names = hvd.allgather_object(socket.gethostname())
    order = list(dict.fromkeys(names))
    return [[rank for rank, name in enumerate(names) if name == host] for host in order]
