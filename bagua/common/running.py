"""A running engine, and what its ranks know of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bagua.common.config import Config, malloc_is_told, nccl_shares_gpu
from bagua.common.core import core
from bagua.common.errors import BaguaError
from bagua.common.heap import give_back_freed, keep_freed
from bagua.common.kinds import Kind, Urgency
from bagua.common.machine import core_share
from bagua.common.meeting import Card, by_host, forget_copy, introduce, meet, private_copy
from bagua.common.messages import Messages
from bagua.common.mpi import MPI
from bagua.common.nccl import library_path
from bagua.common.process_set import ProcessSet, global_process_set
from bagua.common.warn import warn

_MOST_HELPERS = 3  # a few cores use up the bandwidth of the memory


class World:
    """See the module."""

    def __init__(self, comm: MPI.Comm, config: Config) -> None:
        self.config = config
        self._parent = comm
        timeout_s = config.start_timeout_s
        self.rank: int = comm.rank
        self.size: int = comm.size
        card, error = Card(), None
        try:
            card.write(config)
            settings = self._settings()
            listener = self._listen(card)
        except Exception as problem:  # told to those who would wait for this rank
            error = problem
            card.excuse(self.rank, problem)
        meet(comm, timeout_s)
        message_comm = private_copy(comm, "messages", timeout_s)
        self._comm = private_copy(comm, "engine", timeout_s)  # the engine's until it stops
        try:
            cards = introduce(self._comm, card, timeout_s)
        except BaguaError:
            if error is not None:
                raise error from None
            raise
        hosts = [card.host for card in cards]
        mine = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.local_rank = mine.index(self.rank)
        self.local_size = len(mine)
        peers = [ranks[self.local_rank] for ranks in by_host(hosts) if len(ranks) > self.local_rank]
        self.cross_rank = peers.index(self.rank)
        self.cross_size = len(peers)
        self.is_homogeneous = len({len(ranks) for ranks in by_host(hosts)}) == 1
        self.process_sets: dict[int, ProcessSet] = {}
        # By optimizer whose ranks may have different weights: its algorithm.
        self.unsettled: dict[int, str] = {}
        here = [other.cores for other in cards if other.machine == card.machine]
        self.core_count = core_share(card.cores, here)  # this rank's share of its machine
        self.engine = self._start_engine(settings, listener, cards)
        self.messages = Messages(message_comm, self.engine, config)
        global_process_set.ranks = list(range(self.size))
        global_process_set._bind(0, self.rank)
        self.process_sets[0] = global_process_set
        self._keeps_memory = config.keep_memory and not malloc_is_told()
        if self._keeps_memory:
            keep_freed()

    def overlaps(self, busy_threads: int) -> bool:
        """Whether an exchange while the model computes makes training faster.

        It does where something else than this machine's cores is waited for, or one of them is
        free: computing keeps so many busy, none where devices compute.
        """
        if self.config.overlap != "auto":
            return self.config.overlap == "always"
        return self.local_size < self.size or self.core_count >= busy_threads + 1

    def _settings(self) -> dict[str, Any]:
        """What the engine is told of this rank."""
        settings = asdict(self.config)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            settings["inline_drive"] = False  # then all MPI is on the coordination thread
        settings["nccl_path"] = library_path()
        settings["nccl_shares_gpu"] = nccl_shares_gpu()
        return settings

    def _listen(self, card: Card) -> Any:
        """Where the others' control connections arrive, which is on rank 0."""
        if self.rank != 0:
            return None
        listener = core.Listener(self.size, self.config.network_interfaces)
        card.address = listener.address
        return listener

    def _start_engine(self, settings: dict[str, Any], listener: Any, cards: list[Card]) -> Any:
        if settings["helpers"] < 0:
            settings["helpers"] = min(max(self.core_count - 1, 0), _MOST_HELPERS)
        settings["helpers"] = int(settings["helpers"])
        if self.core_count < 1:
            settings["spin_us"] = 0.0  # spinning would take the core a peer needs
        return core.Engine(
            communicator=MPI._addressof(self._comm),
            listener=listener,
            address=cards[0].address,
            rank=self.rank,
            settings=settings,
            names=[f"host {card.host}, pid {card.pid}" for card in cards],
        )

    def nodes(self, process_set: ProcessSet) -> list[int]:
        """By rank of the set: its node, which it shares with those whose memory it sees."""
        firsts: dict[int, int] = {}  # by their first rank
        nodes = self.engine.nodes_of(process_set._id())
        return [firsts.setdefault(node, rank) for rank, node in enumerate(nodes)]

    def encodes_alone(self, hierarchical: bool, process_set: ProcessSet) -> bool:
        """Whether what a rank gives is encoded by that rank: where nodes have one each, at least.

        Else a node adds up exactly what its ranks give, and encodes that, or nothing if it has all.
        """
        return not hierarchical or len(set(self.nodes(process_set))) == process_set.size()

    def request(
        self, kind: Kind, name: str = "", numbers: Sequence[int] = (), **fields: int
    ) -> Any:
        """Submits a request that carries no tensors; returns its finished handle."""
        root, in_set = fields.get("root", -1), fields.get("set", 0)
        handle = core.submit(
            self.engine,
            kind,
            name,
            [],
            0,
            root,
            1.0,
            1.0,
            in_set,
            numbers,
            Urgency.WAITED,
            None,
            None,
        )
        handle.wait()
        return handle

    def stop(self) -> None:
        """Stops the engine; on rank 0 returns when every rank has, on carriers when theirs have."""
        self.leave_memory()
        for process_set in self.process_sets.values():
            process_set._bind(None, self.rank)
        self.engine.stop()
        while not self.engine.wait_stopped(0.25):
            pass  # back in Python, so that Ctrl-C can end the wait
        if self.engine.failure():
            # What was broken off may still be under way: never use these copies again.
            for purpose in ("engine", "messages"):
                forget_copy(self._parent, purpose)
        elif self.unsettled:
            warn(
                f"training by {', '.join(sorted(set(self.unsettled.values())))} has ended without "
                "settle(), so ranks may have different weights: call the optimizer's settle() on "
                "every rank after the last step"
            )

    def leave_memory(self) -> None:
        """This process trains no more."""
        if self._keeps_memory:
            give_back_freed()
