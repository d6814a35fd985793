"""torch.distributed beside the engine: scripts for Bagua find it started by `init_process_group`.

Nothing of ours goes through it. It has gloo, whose threads sleep until they are needed and whose
ranks connect when something first travels: a start costs milliseconds. Its store, which asks nobody
for a password, listens at one address: inside the machine if all ranks are there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch

from bagua.common.config import gloo_told
from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.objects import allgather_object
from bagua.common.warn import warn
from bagua.common.world import addresses, is_initialized, world

_REACH_S = 1.0  # all addresses of rank 0 are tried at once
_LOCAL = "127.0.0.1"

_started = False  # by us
_hooked = False


def start() -> None:
    """On every rank; unless a script has started it by itself, or this torch has none."""
    distributed = torch.distributed
    able = distributed.is_available() and distributed.is_gloo_available()
    doors = _open_doors() if world().rank == 0 and able else []
    with contextlib.ExitStack() as stack:
        for door in doors:
            stack.enter_context(door)
        told = [door.getsockname()[:2] for door in doors]
        ready = able and not distributed.is_initialized()
        everyone = allgather_object((ready, told))
        if not all(each for each, _ in everyone):
            return
        told = everyone[0][1]
        if world().size == 1:
            host, port = told[0]
            own = host
        else:
            reached = {} if world().rank == 0 else _reached(told)
            by_rank = allgather_object(sorted(reached))[1:]
            common = [host for host, _ in told if all(host in hosts for hosts in by_rank)]
            if not common:
                _warn_of_none([host for host, _ in told], by_rank)
                return
            host, port = common[0], dict(told)[common[0]]
            own = reached.get(host, host)
        _start_at(host, port, own, doors)


def _open_doors() -> list[socket.socket]:
    """Where others may reach this rank."""
    here = world()
    hosts = [_LOCAL] if here.local_size == here.size else addresses()
    doors = []
    for host in sorted(hosts, key=lambda host: ":" in host):  # IPv6 last
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError):
            doors.append(socket.create_server((host, 0), family=family, backlog=here.size + 128))
    return doors


def _reached(doors: Sequence[tuple[str, int]]) -> dict[str, str]:
    """Those of rank 0's addresses that this rank reaches, and its own at the end of each road."""

    def own_address(door: tuple[str, int]) -> str:
        with contextlib.suppress(OSError), socket.create_connection(door, _REACH_S) as road:
            return str(road.getsockname()[0])
        return ""

    if not doors:
        return {}
    with ThreadPoolExecutor(len(doors)) as pool:
        owns = list(pool.map(own_address, doors))
    return {host: own for (host, _), own in zip(doors, owns) if own}


def _warn_of_none(hosts: Sequence[str], by_rank: Sequence[Sequence[str]]) -> None:
    if world().rank == 0:
        without = [rank for rank, reached in enumerate(by_rank, 1) if not reached]
        who = ", ".join(map(str, without)) or "not all of the others"
        warn(
            f"torch.distributed is not started beside bagua: of rank 0's addresses "
            f"{', '.join(hosts) or '(none)'}, rank {who} reached none; see network_interfaces"
        )


def _start_at(host: str, port: int, own: str, doors: Sequence[socket.socket]) -> None:
    global _started
    distributed, here = torch.distributed, world()
    timeout = timedelta(seconds=here.config.start_timeout_s)
    # The store takes the descriptor over.
    door = next((door.detach() for door in doors if door.getsockname()[0] == host), None)
    store = distributed.TCPStore(
        host,
        port,
        here.size,
        here.rank == 0,
        timeout,
        wait_for_workers=False,
        master_listen_fd=door,
    )
    excepthook = sys.excepthook
    with gloo_told(_interface_of(own), afterwards=host != _LOCAL):
        distributed.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size)
    sys.excepthook = excepthook  # torch's writes the rank before each line, as bagua-run does
    _started = True
    _install_hooks()


def _interface_of(address: str) -> str:
    """The name of the network interface that has the address; may be empty."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(UsageError):  # it has no address
            if address in core.local_addresses(name):
                return name
    return ""


def end() -> None:
    """Ends what `start` has started, if nobody has yet."""
    global _started
    started, _started = _started, False
    if started and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _install_hooks() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        atexit.register(_leave)
        os.register_at_fork(after_in_child=_abandon)


def _leave() -> None:
    """Before the engine ends; after a failure that ends the process, whatever threads it has."""
    if not (is_initialized() and world().engine.failure()):
        end()


def _abandon() -> None:
    """The end of gloo waits for threads, which a forked child does not have: so it never comes."""
    atexit.unregister(_leave)
    if _started and torch.distributed.is_initialized():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch.distributed.group.WORLD))
