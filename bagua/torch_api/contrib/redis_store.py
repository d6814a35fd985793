"""Values in Redis servers, each on one of them."""

from __future__ import annotations

import secrets
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from bagua.common.errors import UsageError
from bagua.common.objects import allgather_object, broadcast_object
from bagua.common.world import machine
from bagua.torch_api.contrib.redis_server import RedisServer
from bagua.torch_api.world import get_local_rank, get_rank

_CONNECT_TIMEOUT_S = 10
_AT_ONCE = 1000  # keys that a server looks at before it answers others, when they are counted

Address = Mapping[str, Any]


class RedisStore:
    """Without `hosts`, every machine gets a server that lives as long as the job; all ranks call.

    These servers listen to their own machine only, or, where there are several, to those who know
    the job's password. Needs redis-py and redis-server 6.2: `pip install 'bagua[redis]'`.

    Args:
        name: of the data set; in front of its keys.
        hosts: servers that run already: `[{"host": "192.168.1.10", "port": 7000}, ...]`, with a
            password or a unix_socket_path as redis-py names them. The same on all ranks.
        cluster_mode: machines share what they have; else each has all that it needs.
        capacity_per_node: bytes; a server that is full forgets some values for others.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[Address] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int = 100 * 2**30,
    ) -> None:
        _client_library()
        name = quote(name, safe="")
        self._prefix = f"{name}:"  # no name begins like another one
        self._fact = f"{name}/fact"
        self._server: RedisServer | None = None
        if hosts is None:
            self._server, addresses = _started(cluster_mode, capacity_per_node)
        elif not hosts:
            raise UsageError("hosts is empty; leave it out to have servers started")
        elif not name:
            raise UsageError(
                "dataset_name is needed with hosts: these servers keep the samples of all data "
                "sets; give each one a name, and another one when its samples change"
            )
        else:
            addresses = list(hosts)
        self._addresses: list[Address] = addresses
        self._full = False
        self._clients = [_connected(address) for address in addresses]

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned: they have connections of their own."""
        return {**vars(self), "_clients": None, "_server": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._clients = [_connected(address) for address in self._addresses]

    def get(self, key: str) -> bytes | None:
        name = self._prefix + key
        found: bytes | None = self._clients[self._number(name)].get(name)
        return found

    def put(self, values: Mapping[str, bytes]) -> None:
        by_server: dict[int, dict[str, bytes]] = {}
        for key, data in values.items():
            name = self._prefix + key
            by_server.setdefault(self._number(name), {})[name] = data
        for number, some in by_server.items():
            try:
                self._clients[number].mset(some)
            except _client_library().exceptions.OutOfMemoryError:
                if not self._full:
                    warnings.warn(
                        f"redis at {_said(self._addresses[number])} is full and forgets nothing "
                        "(see its maxmemory-policy); the rest is not cached",
                        stacklevel=2,
                    )
                self._full = True

    def count(self) -> int:
        found = (client.scan_iter(f"{self._prefix}*", count=_AT_ONCE) for client in self._clients)
        return sum(1 for keys in found for _ in keys)

    def agree(self, fact: str) -> str:
        client = self._clients[self._number(self._fact)]
        client.set(self._fact, fact, nx=True)
        kept: bytes | None = client.get(self._fact)
        return fact if kept is None else kept.decode()

    def _number(self, name: str) -> int:
        """Which server; the same in every process."""
        return zlib.crc32(name.encode()) % len(self._addresses)


def _started(share: bool, capacity: int) -> tuple[RedisServer | None, list[Address]]:
    """This rank's server, if it is the one to start it, and the addresses of those to ask."""
    first = get_local_rank() == 0
    several = len(set(allgather_object(machine()))) > 1
    password = broadcast_object(secrets.token_hex(16) if get_rank() == 0 else None)
    server, problem = None, None
    try:
        server = RedisServer(capacity, password if several and share else None) if first else None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    everyone = allgather_object((machine(), server and server.address, problem))
    for rank, (_, _, text) in enumerate(everyone):
        if text is not None:
            raise UsageError(f"no redis server on rank {rank}: {text}")
    addresses = [
        address
        for where, address, _ in everyone
        if address is not None and (share or where == machine())
    ]
    return server, addresses


def _connected(address: Address) -> Any:
    redis = _client_library()
    try:
        client = redis.Redis(**address, socket_connect_timeout=_CONNECT_TIMEOUT_S)
        client.ping()
    except (redis.exceptions.RedisError, TypeError) as error:
        raise UsageError(
            f"redis at {_said(address)} does not answer: {error}; start redis-server there, or "
            "leave hosts out"
        ) from error
    return client


def _said(address: Address) -> str:
    return str({key: value for key, value in address.items() if key != "password"})


def _client_library() -> Any:
    try:
        import redis
    except ModuleNotFoundError as error:
        raise UsageError(
            "backend='redis' needs redis-py: pip install 'bagua[redis]'; backend='files' needs "
            "nothing"
        ) from error
    return redis
