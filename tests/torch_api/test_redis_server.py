"""What is left of a Redis server when its process or its job ends, in any way: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bagua.torch_api.contrib import redis_server

pytestmark = pytest.mark.slow

pytest.importorskip("redis", reason="redis-py is not installed")


@pytest.fixture(autouse=True)
def _executable():
    try:
        redis_server._executable()
    except ValueError as error:
        pytest.skip(str(error))


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


STARTS = """
import os, redis, sys, time
from bagua.torch_api.contrib.redis_server import RedisServer
server = RedisServer(2**24, ["127.0.0.1"] if sys.argv[2] == "port" else ())
print(redis.Redis(**server.addresses[0]).info("server")["process_id"], flush=True)
if sys.argv[1] == "kill":
    time.sleep(100)
"""


@pytest.mark.parametrize("where", ["socket", "port"])
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_server_ends_with_its_process(end, where, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS, end, where],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    pid = process.stdout.readline()
    if end == "kill":
        assert not gone(int(pid))
        process.send_signal(signal.SIGKILL)
    process.wait(60)
    deadline = time.monotonic() + 30
    while not gone(int(pid)):
        assert time.monotonic() < deadline, pid
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())


FAILS = """
import os, sys
import bagua.torch as bagua
from bagua.torch_api.contrib import CacheLoader
bagua.init()
cache = CacheLoader("redis", capacity_per_node=2**24)
cache.get(bagua.rank(), str)
bagua.barrier()
if sys.argv[1] == "exception" and bagua.rank() == 1:
    raise ValueError("x")
if sys.argv[1] == "exit" and bagua.rank() == 1:
    os._exit(3)
if sys.argv[1] == "kill" and bagua.rank() == 0:
    os.kill(os.getpid(), 9)
bagua.barrier()
"""


@pytest.mark.parametrize("how", ["exception", "exit", "kill"])
def test_a_job_that_fails_leaves_no_file(tmp_path, how):
    command = ["-np", "2", sys.executable, "-c", FAILS, how]
    done = subprocess.run(
        [sys.executable, "-m", "bagua.launch", *command],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode not in (0, 2), done.stderr
    assert not list(tmp_path.rglob("bagua-redis-*"))


def test_a_cache_starts_the_engine_if_need_be():
    program = (
        "from bagua.torch_api.contrib import CacheLoader\n"
        "cache = CacheLoader('redis', capacity_per_node=2**24)\n"
        "print(cache.get(1, str), cache.num_keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["1", "1"], done.stderr
