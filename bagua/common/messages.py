"""Messages from one rank to another, beside the engine, whose operations are collective.

They have a communicator of their own and are sent and received by the thread that asks. Each is a
header, the number of the element type and the count, and then the payload in pieces.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from bagua.common.config import Config
from bagua.common.errors import PeerError, UsageError
from bagua.common.kinds import DTYPES
from bagua.common.mpi import MPI

_PIECE_NBYTES = 1 << 30  # MPI counts with 32 bits
_SPIN_S = 0.0001
_LONGEST_SLEEP_S = 0.001


class Messages:
    """Blocking sends and receives of one world; ranks are its ranks."""

    def __init__(self, comm: MPI.Comm, engine: Any, config: Config) -> None:
        self._comm = comm
        self._engine = engine
        self._config = config
        self._abandoned: list[Any] = []  # MPI may still write to what a failed wait left behind

    def send(self, data: Any, dtype: int, to: int, channel: int) -> None:
        """Sends `data`, bytes that hold elements of `dtype`; returns when they may be changed.

        Messages of one channel arrive in the order in which they were sent.
        """
        self._check(to)
        header = np.array([dtype, len(data)], np.int64)
        requests = [self._comm.Isend([header, MPI.BYTE], to, channel)]
        requests += [self._comm.Isend([piece, MPI.BYTE], to, channel) for piece in _pieces(data)]
        self._wait(requests, (header, data), f"send to rank {to}", "receive")

    def receive(self, data: Any, dtype: int, source: int, channel: int) -> None:
        """Fills `data`; a message of another type or length is dropped, and an error."""
        self._check(source)
        what = f"receive from rank {source}"
        header = np.empty(2, np.int64)
        self._wait([self._comm.Irecv([header, MPI.BYTE], source, channel)], header, what, "send")
        sent_dtype, nbytes = int(header[0]), int(header[1])
        fits = (sent_dtype, nbytes) == (dtype, len(data))
        target = data if fits else np.empty(nbytes, np.uint8)
        requests = [
            self._comm.Irecv([piece, MPI.BYTE], source, channel) for piece in _pieces(target)
        ]
        self._wait(requests, target, what, "send")
        if not fits:
            raise UsageError(
                f"{what}: it sent {nbytes} bytes of {DTYPES[sent_dtype]}, and here is a tensor of "
                f"{len(data)} bytes of {DTYPES[dtype]}"
            )

    def _check(self, peer: int) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UsageError("messages between ranks need an MPI with MPI_THREAD_MULTIPLE")
        if peer == self._comm.rank:
            raise UsageError(f"rank {peer} exchanges a message with itself")

    def _wait(self, requests: list[MPI.Request], memory: Any, what: str, partner: str) -> None:
        """Polls, so that Ctrl-C, the death of a rank and `stall_fail_s` end it."""
        try:
            self._poll(requests, what, partner)
        except BaseException:
            self._abandoned.append((requests, memory))
            raise

    def _poll(self, requests: list[MPI.Request], what: str, partner: str) -> None:
        config, began, warned = self._config, time.monotonic(), False
        while True:
            waited_s = time.monotonic() - began
            problem = self._engine.failure()
            try:
                if MPI.Request.Testall(requests):
                    return
            except MPI.Exception as error:
                problem = problem or str(error)
            if 0 < config.stall_fail_s < waited_s:
                problem = f"not done after {waited_s:.0f} s (stall_fail_s); does it {partner}?"
            if problem:
                raise PeerError(f"{what}: {problem}")
            if not warned and 0 < config.stall_warn_s < waited_s:
                warned = True
                print(
                    f"bagua: {what} has been waiting for {waited_s:.0f} s; does it {partner}?",
                    file=sys.stderr,
                )
            time.sleep(0 if waited_s < _SPIN_S else min(waited_s / 10, _LONGEST_SLEEP_S))


def _pieces(data: Any) -> list[Any]:
    return [data[i : i + _PIECE_NBYTES] for i in range(0, len(data), _PIECE_NBYTES)]
