"""Values in Redis servers, each on one of them."""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from bagua.common.errors import UsageError
from bagua.common.machine import machine
from bagua.common.objects import allgather_object
from bagua.common.warn import warn
from bagua.common.world import addresses
from bagua.torch_api.contrib.redis_server import RedisServer
from bagua.torch_api.world import get_local_rank

_CONNECT_TIMEOUT_S = 10
_ANSWER_TIMEOUT_S = 30
_LOST_S = 60  # before a server that was lost is asked again
_AT_ONCE = 1000  # keys that a server looks at before it answers others, when they are counted

Address = Mapping[str, Any]


class RedisStore:
    """Without `hosts`, every machine gets a server that lives as long as the job; all ranks call.

    These servers listen to their own machine only. Where there are several machines, they listen at
    the addresses of `network_interfaces` to those who know a password; it and the values, which are
    pickles, are sent in clear text: for a network that you trust. Needs redis-py and redis-server
    6.2: `pip install 'bagua[redis]'`.

    Args:
        name: of the data set; in front of its keys.
        hosts: servers that run already: `[{"host": "192.168.1.10", "port": 7000}, ...]`, with a
            password or a unix_socket_path as redis-py names them. The same on all ranks.
        cluster_mode: machines share what they have; else each has all that it needs.
        capacity_per_node: bytes; a server that is full forgets some values for others. Stores of
            one capacity share the servers.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[Address] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int = 100 * 2**30,
    ) -> None:
        if hosts is None:
            word, started = _started(cluster_mode, capacity_per_node)
            name = f"{name}/{word}"  # nobody else's, though servers are
            self._addresses = [
                _answering(
                    found,
                    f"rank {rank} has started it: is a firewall between the machines, or should "
                    "network_interfaces name another interface? (hosts=[...] names servers that "
                    "run already)",
                )
                for rank, found in started.items()
            ]
        elif not hosts:
            raise UsageError("hosts is empty; leave it out to have servers started")
        elif not name:
            raise UsageError(
                "dataset_name is needed with hosts: these servers keep the samples of all data "
                "sets; give each one a name, and another one when its samples change"
            )
        else:
            remedy = "start redis-server there, or leave hosts out to have servers started"
            self._addresses = [_answering([address], remedy) for address in hosts]
        name = quote(name, safe="")
        self._prefix = f"{name}:"  # no name begins like another one
        self._fact = f"{name}/fact"
        self._full = False
        self._lost_until: dict[int, float] = {}  # by server, a time.monotonic()
        self._clients = [_client(address) for address in self._addresses]

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned: they have connections of their own."""
        return {**vars(self), "_clients": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._clients = [_client(address) for address in self._addresses]

    def get(self, key: str) -> bytes | None:
        name = self._prefix + key
        found: bytes | None = self._ask(self._number(name), lambda client: client.get(name))
        return found

    def put(self, values: Mapping[str, bytes]) -> None:
        by_server: dict[int, dict[str, bytes]] = {}
        for key, data in values.items():
            name = self._prefix + key
            by_server.setdefault(self._number(name), {})[name] = data
        for number, some in by_server.items():
            self._ask(number, functools.partial(self._write, number, some))

    def _write(self, number: int, values: dict[str, bytes], client: Any) -> None:
        self._unless_full(number, lambda: client.mset(values))

    def _unless_full(self, number: int, write: Callable[[], Any]) -> None:
        try:
            write()
        except _client_library().exceptions.ResponseError as error:
            if "maxmemory" not in str(error):  # older clients have no class for it
                raise
            if not self._full:
                warn(
                    f"redis at {_said(self._addresses[number])} is full and forgets nothing (see "
                    "its maxmemory-policy); the rest is not cached",
                )
            self._full = True

    def count(self) -> int:
        def keys(client: Any) -> int:
            return sum(1 for _ in client.scan_iter(f"{self._prefix}*", count=_AT_ONCE))

        return sum(self._ask(number, keys) or 0 for number in range(len(self._clients)))

    def agree(self, fact: str) -> str:
        number = self._number(self._fact)

        def first(client: Any) -> bytes | None:
            self._unless_full(number, lambda: client.set(self._fact, fact, nx=True))
            kept: bytes | None = client.get(self._fact)
            return kept

        kept = self._ask(number, first)
        return fact if kept is None else kept.decode()

    def _ask(self, number: int, question: Callable[[Any], Any]) -> Any:
        """None from a server that is lost: a cache may forget, and training goes on."""
        if time.monotonic() < self._lost_until.get(number, 0.0):
            return None
        exceptions = _client_library().exceptions
        try:
            return question(self._clients[number])
        except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
            if number not in self._lost_until:
                warn(
                    f"redis at {_said(self._addresses[number])} is lost: {error}; what it had is "
                    "made again",
                )
            self._lost_until[number] = time.monotonic() + _LOST_S
            return None

    def _number(self, name: str) -> int:
        """Which server; the same in every process."""
        return zlib.crc32(name.encode()) % len(self._addresses)


def _started(share: bool, capacity: int) -> tuple[str, dict[int, list[Address]]]:
    """A word that no other store has, and by rank the servers to ask, each by its addresses."""
    starts = get_local_rank() == 0  # first: this starts the engine if need be
    several = len(set(allgather_object(machine()))) > 1
    mine, problem = None, None
    try:  # all that can fail here: the others wait for us
        _client_library()
        if starts:
            mine = _server_here(capacity, several and share).addresses
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    everyone = allgather_object((machine(), mine, problem, secrets.token_hex(8)))
    for rank, (_, _, text, _) in enumerate(everyone):
        if text is not None:
            raise UsageError(f"no redis server on rank {rank}: {text}")
    servers = {
        rank: found
        for rank, (where, found, _, _) in enumerate(everyone)
        if found is not None and (share or where == machine())
    }
    return everyone[0][-1], servers


def _server_here(capacity: int, outside: bool) -> RedisServer:
    server = _server(capacity, outside)
    if not server.answers():
        _server.cache_clear()
        server = _server(capacity, outside)
    return server


@functools.lru_cache
def _server(capacity: int, outside: bool) -> RedisServer:
    """One for all stores of this process: other ranks use it when ours has been dropped."""
    return RedisServer(capacity, addresses() if outside else ())


def _answering(found: Sequence[Address], remedy: str) -> Address:
    """The first of a server's addresses at which it does answer."""
    redis = _client_library()
    problems = []
    for address in found:
        try:
            with contextlib.closing(_client(address)) as client:
                client.ping()
            return address
        except (redis.exceptions.RedisError, TypeError) as error:
            problems.append(f"redis at {_said(address)} does not answer: {error}")
    raise UsageError(f"{'; '.join(problems)}; {remedy}")


def _client(address: Address) -> Any:
    redis = _client_library()
    defaults = {
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": _ANSWER_TIMEOUT_S,
        # Once, for a server that was started again; newer clients would try for seconds.
        "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 1),
    }
    return redis.Redis(**{**defaults, **address})


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
