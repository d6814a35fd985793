"""Network namespaces as hosts, with links of a given speed: a slow network on one machine.

    python -m benchmarks.hosts --hosts 2 --ranks 2 --rate 1gbit -- python program.py

Every host is a namespace with its own address and host name, joined to the others by a bridge; `tc
tbf` shapes what it sends and what it is sent. Hosts have cores of their own, or an equal share of
one. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SUBNET = "10.77.0"


class Hosts:
    """Namespaces `<prefix>0`, `<prefix>1`, ... and a bridge between them."""

    def __init__(self, count: int, rate: str) -> None:
        self.prefix = f"bg{os.getpid() % 10000}h"
        self.count = count
        self.rate = rate

    def name(self, number: int) -> str:
        return f"{self.prefix}{number}"

    def address(self, number: int) -> str:
        return f"{_SUBNET}.{number + 1}"

    def __enter__(self) -> Hosts:
        switch = self.name(self.count)  # the bridge lives in a namespace of its own
        try:
            _ip(f"netns add {switch}")
            _ip(f"-n {switch} link add bridge type bridge")
            _ip(f"-n {switch} link set bridge up")
            for number in range(self.count):
                self._add(number, switch)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, number: int, switch: str) -> None:
        host = self.name(number)
        _ip(f"netns add {host}")
        _ip(f"-n {host} link set lo up")
        _ip(f"-n {host} link add eth0 type veth peer name port{number} netns {switch}")
        _ip(f"-n {switch} link set port{number} master bridge up")
        _ip(f"-n {host} addr add {self.address(number)}/24 dev eth0")
        _ip(f"-n {host} link set eth0 up")
        for namespace, device in ((host, "eth0"), (switch, f"port{number}")):
            shape = f"root tbf rate {self.rate} burst 256kb latency 50ms"
            _run(f"tc -n {namespace} qdisc add dev {device} {shape}")

    def __exit__(self, *_: object) -> None:
        for number in range(self.count + 1):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns del {self.name(number)}")

    def inside(self, number: int) -> list[str]:
        """A prefix for commands that run on a host."""
        host = self.name(number)
        return [
            *("ip", "netns", "exec", host, "unshare", "--uts"),
            *("taskset", "--cpu-list", ",".join(map(str, self._cores(number)))),
            *("sh", "-c", f'hostname {host} && exec "$@"', "sh"),
        ]

    def _cores(self, number: int) -> list[int]:
        all_cores = sorted(os.sched_getaffinity(0))
        own = len(all_cores) // self.count
        if own == 0:
            return [all_cores[number % len(all_cores)]]
        return all_cores[number * own : (number + 1) * own]

    @contextlib.contextmanager
    def mpirun(self, ranks: int | Sequence[int], dealt: bool = False) -> Iterator[list[str]]:
        """The beginning of a command that starts so many ranks on every host, or on each: side by
        side, or dealt out to the hosts one by one.
        """
        of_host = [ranks] * self.count if isinstance(ranks, int) else list(ranks)
        if len(of_host) != self.count:
            raise ValueError(f"numbers of ranks for {len(of_host)} hosts: there are {self.count}")
        with tempfile.TemporaryDirectory() as folder:
            agent = Path(folder, "agent")
            cases = "".join(
                f'{self.address(number)}) exec {shlex.join(self.inside(number))} sh -c "$*";;\n'
                for number in range(self.count)
            )
            agent.write_text(f'#!/bin/sh\nhost=$1; shift\ncase "$host" in\n{cases}esac\nexit 1\n')
            agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
            where = ",".join(f"{self.address(n)}:{many}" for n, many in enumerate(of_host))
            beside = Path(sys.executable).parent  # where the mpirun of this Python lies
            yield [
                *self.inside(0),
                *("env", f"PATH={beside}:{os.environ['PATH']}"),
                *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
                *("--prtemca", "plm_ssh_agent", str(agent), "--host", where),
                *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"),
                *("--mca", "btl_tcp_if_include", f"{_SUBNET}.0/24"),
                *("--map-by", "node" if dealt else "slot"),
                *("-n", str(sum(of_host))),
            ]


def missing() -> str:
    """Why this machine cannot have hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "unshare", "taskset"):
        if shutil.which(tool) is None:
            return f"network namespaces need `{tool}`, which is missing"
    name = f"bg{os.getpid() % 10000}probe"
    commands = [
        f"ip netns add {name}",
        f"ip -n {name} link add bridge type bridge",
        f"ip -n {name} link add eth0 type veth peer name port0",
        f"tc -n {name} qdisc add dev eth0 root tbf rate 1gbit burst 256kb latency 50ms",
        f"ip netns exec {name} unshare --uts hostname {name}",
    ]
    try:
        for command in commands:
            done = subprocess.run(shlex.split(command), capture_output=True, text=True)
            if done.returncode != 0:
                return f"no network namespaces here: `{command}`: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


def sent_nbytes() -> int:
    """Bytes that have left the host that this process is on.

    Those of packets as the kernel makes them, up to 64 KB, which have one header each.
    """
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


@dataclass
class Link:
    """Of the host that this process is on: what it may carry, and what it has."""

    bytes_per_s: float
    burst_nbytes: int  # at once, after it has been idle
    sent_nbytes: int  # with the headers of every packet on the wire, which the rate counts, too

    @classmethod
    def now(cls) -> Link:
        told = subprocess.check_output(["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"])
        shape = next(row for row in json.loads(told) if row["kind"] == "tbf")
        options = shape["options"]
        return cls(options["rate"], options["burst"], shape["bytes"])


def _run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


def _ip(command: str) -> None:
    _run(f"ip {command}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on every host")
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc takes it")
    parser.add_argument("program", nargs="+", help="after --")
    args = parser.parse_args()
    with Hosts(args.hosts, args.rate) as hosts, hosts.mpirun(args.ranks) as mpirun:
        return subprocess.run([*mpirun, *args.program]).returncode


if __name__ == "__main__":
    sys.exit(main())
