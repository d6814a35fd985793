"""Which hosts take part and with how many slots."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass

from bagua.common.errors import UsageError

_SCHEDULER_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID")


@dataclass(frozen=True)
class Host:
    name: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"

    @property
    def is_local(self) -> bool:
        own = socket.gethostname()
        return self.name in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0])


def parse_hosts(text: str) -> list[Host]:
    """`h1:2,h2:4`; a host without a number has one slot, one named twice the sum."""
    return _merged(
        [_parse_host(word, f"-H {text}") for word in text.split(",") if word.strip()], f"-H {text}"
    )


def read_hostfile(path: str) -> list[Host]:
    """One host a line, as `host slots=N`, `host:N` or `host`; `#` begins a comment."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--hostfile {path}: not text in UTF-8, at byte {error.start}") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_parse_line(words, f"--hostfile {path}, line {number}"))
    return _merged(hosts, f"--hostfile {path}")


def under_scheduler() -> bool:
    """Whether a batch system has allotted the hosts, which mpirun then asks for itself."""
    return any(name in os.environ for name in _SCHEDULER_VARIABLES)


def core_count() -> int:
    """Physical cores this process may use: mpirun counts those, not hardware threads."""
    threads = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = set()
    for thread in threads:
        try:
            with open(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list") as file:
                cores.add(file.read().strip())
        except OSError:
            cores.add(str(thread))
    return len(cores)


def _parse_line(words: list[str], source: str) -> Host:
    if len(words) == 1:
        return _parse_host(words[0], source)
    options = dict(word.partition("=")[::2] for word in words[1:])
    if set(options) - {"slots", "max_slots", "max-slots"}:
        raise UsageError(
            f"{source}: {' '.join(words)!r} is not understood; write 'host slots=N' or 'host:N'"
        )
    return _parse_host(f"{words[0]}:{options.get('slots', '1')}", source)


def _parse_host(word: str, source: str) -> Host:
    found = re.fullmatch(r"\s*(\[[0-9a-fA-F:.]+\]|[^:\s]+)(?::(\d+))?\s*", word)
    if not found or found[2] == "0":
        raise UsageError(
            f"{source}: {word!r} is not a host; write 'host' or 'host:slots' with at least one slot"
        )
    return Host(found[1].strip("[]"), int(found[2] or 1))


def _merged(hosts: list[Host], source: str) -> list[Host]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    if not slots:
        raise UsageError(f"{source}: no host in it")
    return [Host(name, count) for name, count in slots.items()]
