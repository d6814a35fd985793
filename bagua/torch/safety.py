"""Looks that no exchange needs: whether replicas are still equal, and gradients are numbers."""

from __future__ import annotations

import contextlib
import math
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from bagua.common.errors import BaguaError, JoinedError
from bagua.common.kinds import Kind, ReduceOp
from bagua.common.numpy_ops import allreduce, allreduce_async_
from bagua.common.objects import allgather_object
from bagua.common.process_set import ProcessSet
from bagua.common.ranks_text import ranks_text
from bagua.common.requests import refuse_quietly
from bagua.common.warn import warn
from bagua.common.world import world
from bagua.torch import capture
from bagua.torch.driver import Driver
from bagua.torch.standing import Standing

Named = Sequence[tuple[str, torch.Tensor]]
Tensors = Iterable[tuple[str, torch.Tensor]]

_SAMPLE = 64


class ReplicasDifferError(BaguaError):
    """Weights that should be equal on all ranks are not."""


def check_replicas(named: Named, name: str, process_set: ProcessSet) -> None:
    """Raises on every rank, naming the first parameter that differs, and who differs from whom."""
    mine = [_checksum(param) for _, param in named]
    if alike(zlib.crc32(np.array(mine, np.uint32).data), name, process_set):
        return
    if text := _difference(named, mine, name, process_set):
        raise ReplicasDifferError(
            f"{text}. Something changes weights on some ranks only, or ranks began unequal: call "
            "broadcast_parameters() after loading and seed what all must draw alike"
        )


class Replicas:
    """Looks at replicas every `check_replicas_every` steps."""

    def __init__(self) -> None:
        self._looked = 0  # the last step after which it did
        self._told = False  # that there is nothing to compare

    def go_to(self, step: int) -> None:
        """As all ranks do."""
        self._looked = step

    def look(self, step: int, driver: Driver, standing: Standing) -> None:
        every = int(world().config.check_replicas_every)
        equal = driver.equal_now()
        if every and driver.alone and not self._told:
            self._told = True
            if standing.process_set.rank() == 0:
                warn(
                    "check_replicas_every compares nothing while ranks step each by itself; "
                    "optimizer.consensus_distance(), called on all, tells how far they are apart"
                )
        if not every or not (equal or driver.drifts):
            return
        capture.refuse("check_replicas_every has the host look at weights")
        if step // every == self._looked // every:
            return
        self._looked = step
        named, process_set = driver.named(), standing.process_set
        if equal:
            return check_replicas(named, standing.name("replicas"), process_set)
        distance = consensus_distance(named, standing.name("consensus"), process_set)
        if process_set.rank() == 0:
            print(
                f"bagua: after step {step} replicas are {distance:.2g} apart "
                "(consensus distance, relative to their mean)",
                file=sys.stderr,
            )


def warn_of_difference(named: Named, name: str, process_set: ProcessSet) -> None:
    """Ranks are about to exchange gradients for the first time, and their samples differ."""
    text = _difference(named, [_checksum(param) for _, param in named], name, process_set)
    text = text or "replicas differ, nobody says where since a rank has joined"
    if process_set.rank() == 0:
        warn(
            f"{text}. They share gradients from now on, but began unequal and stay so: call "
            "broadcast_parameters(model.state_dict(), root_rank=0) after making or loading the "
            "model, and broadcast_optimizer_state(optimizer, root_rank=0) after loading its state",
        )


def warn_of_frozen(named: Named, name: str, process_set: ProcessSet) -> None:
    """Tells if any of these, which nobody exchanges, is not the same on all ranks that have it."""
    greatest = allreduce(sample(named), name=name, op=ReduceOp.Max, process_set=process_set)
    if not samples_differ(greatest):
        return
    try:
        everyone = allgather_object({of: _checksum(p) for of, p in named}, name, process_set)
    except JoinedError:
        return
    differ = [of for of, _ in named if len({theirs.get(of) for theirs in everyone} - {None}) > 1]
    if differ and process_set.rank() == 0:
        more = f", nor are {len(differ) - 1} more" if len(differ) > 1 else ""
        warn(
            f"{differ[0]} is frozen and not the same on all ranks{more}: no exchange and no "
            "settle() changes that. Call broadcast_parameters(model.state_dict(), root_rank=0), or "
            "settle() before freezing"
        )


def sample(named: Named) -> Any:
    """Of the first few values of every parameter: what was drawn differs there.

    The bytes of a checksum, and what each lacks to 255. Their greatest over all ranks tell whether
    all have the same, also where a rank has joined, whose are zeros.
    """
    checksum = 0
    for _, param in named:
        checksum = of_first(param, checksum)
    return _with_complement(checksum)


def sample_of(text: str) -> Any:
    """The same of other things."""
    return _with_complement(checksum_of(text))


def checksum_of(text: str) -> int:
    return zlib.crc32(text.encode())


def _with_complement(checksum: int) -> Any:
    values = np.frombuffer(checksum.to_bytes(4, "little"), np.uint8)
    return np.concatenate([values, 255 - values])


def samples_differ(greatest: Any) -> bool:
    values, lacking = np.split(greatest, 2)
    return bool(np.any(values != 255 - lacking))


def _difference(named: Named, mine: list[int], name: str, process_set: ProcessSet) -> str:
    """The first parameter that is not the same on all ranks, and on whom; empty if all are."""
    try:
        everyone = allgather_object(mine, f"{name}.each", process_set)
    except JoinedError:
        return ""  # a rank has joined, and looks no more
    for i, (param_name, _) in enumerate(named):
        ranks_of: dict[int, list[int]] = {}
        for rank, sums in zip(process_set.ranks, everyone):
            ranks_of.setdefault(sums[i], []).append(rank)
        if len(ranks_of) > 1:
            parties = " and ".join(ranks_text(ranks) for ranks in ranks_of.values())
            more = sum(len({sums[j] for sums in everyone}) > 1 for j in range(i + 1, len(named)))
            are = "is 1 more" if more == 1 else f"are {more} more"
            others = f", nor {are} after it" if more else ""
            return f"replicas differ: {param_name} is not the same on {parties}{others}"
    return ""


def consensus_distance(named: Named, name: str, process_set: ProcessSet) -> float:
    """How far ranks are apart: their distances from the mean, by root mean square, relative."""

    def average(values: Any) -> Any:
        return allreduce(values, name=name, op=ReduceOp.Average, process_set=process_set)

    share = float(average(np.ones(1))[0])  # less than 1 where ranks have joined, whose are zeros
    square = size = 0.0
    for _, param in named:
        dtype = torch.complex128 if param.is_complex() else torch.float64
        mine = param.detach().to("cpu", dtype).numpy()
        mean = average(mine) / share
        square += float(np.square(np.abs(mine - mean)).sum())
        size += float(np.square(np.abs(mean)).sum())
    total = float(average(np.array([square]))[0]) / share
    return math.sqrt(total / size) if size else 0.0


def alike(number: float, name: str, process_set: ProcessSet) -> bool:
    """Whether it is the same on all ranks: where the largest is the smallest, in one exchange."""
    both = np.array([number, -number], np.float64)
    both = allreduce(both, name=name, op=ReduceOp.Max, process_set=process_set)
    return bool(both[0] == -both[1])


def _checksum(param: torch.Tensor, before: int = 0) -> int:
    if not param.numel():  # which may have strides that no other element type has
        return before
    values = param.detach().cpu().contiguous().flatten()
    values = values.as_strided(values.shape, (1,)).view(torch.uint8)  # one has whatever stride
    return zlib.crc32(values.numpy().data, before)


def of_first(tensor: torch.Tensor, before: int = 0) -> int:
    """A checksum of its first few values."""
    return _checksum(tensor.detach().flatten()[:_SAMPLE], before)


def begins_with_zeros(tensor: torch.Tensor) -> bool:
    """Of its first few values; an empty one does."""
    values = tensor.detach()
    values = values._values() if values.is_sparse else values
    return not values.flatten()[:_SAMPLE].any()


def looks_at_all() -> bool:
    """Whether all that is exchanged is looked at, before and after."""
    return world().config.check_finite in ("report", "skip")


def first_not_finite(named: Named) -> str:
    """The parameter whose gradient holds a NaN or an Inf; an empty string if none does."""
    return first_odd((name, param.grad) for name, param in named if param.grad is not None)


def first_odd(named: Tensors) -> str:
    """The first of these tensors that does; by its name."""
    for name, tensor in named:
        values = tensor.detach()
        values = values._values() if values.is_sparse else values
        # A sum is a tenth of the work, and overflows only where little is left to lose.
        if not values.sum().isfinite() and not values.isfinite().all():
            return name
    return ""


class Seen:
    """Tells of what exchanges have seen that was no number; not again before it has been over."""

    _OVER = 100  # steps without

    def __init__(self) -> None:
        self._last = -self._OVER  # the step of which there was something to tell

    def tell(self, step: int, carrier: Any, what: str, named: Tensors) -> None:
        """Of this bucket or piece, in which the tensors are."""
        whose, carrier.odd = carrier.odd, ()
        if not whose or world().config.check_finite != "watch":
            return
        name = first_odd(named)
        if not name:
            return  # what went with it had some
        began, self._last = step >= self._last + self._OVER, max(step, self._last)
        if began:
            ranks = ", ".join(f"rank {rank}" if rank >= 0 else "some rank" for rank in whose)
            warn(
                f"step {step}: NaN or Inf in {what} {name} ({carrier.name}), of {ranks}. "
                "check_finite=skip leaves such steps out; off says nothing"
            )


class NonFinite:
    """Finds out on which rank values held a NaN or an Inf, before they are everybody's."""

    def __init__(self, process_set: ProcessSet, name: str) -> None:
        self._process_set, self._name = process_set, name
        self._mine: dict[str, str] = {}  # by bucket: the first such parameter
        self._flag = np.zeros(1, np.uint8)  # whether any rank has one, when it has been asked
        self._asked: Any = None

    def look(self, where: str, named: Named) -> None:
        """At gradients that are about to travel there."""
        if name := first_not_finite(named):
            self._mine[where] = name

    def look_at_values(self, where: str, named: Tensors) -> None:
        """At the tensors themselves."""
        if name := first_odd(named):
            self._mine[where] = name

    @property
    def asked(self) -> bool:
        return self._asked is not None

    def ask(self) -> None:
        """Begins to find out, without waiting. Also a rank that has joined takes part."""
        self._flag[0] = bool(self._mine)
        self._asked = allreduce_async_(
            self._flag, name=self._name, op=ReduceOp.Max, process_set=self._process_set
        )

    def refuse(self, problem: str) -> None:
        """The others hear why this rank does not ask."""
        if not self.asked:
            refuse_quietly(Kind.ALLREDUCE, self._name, self._process_set, problem)

    def settle(self) -> None:
        """Waits for what was asked, without using it."""
        asked, self._asked = self._asked, None
        if asked is not None:
            with contextlib.suppress(BaguaError):
                asked.wait()

    def forget(self) -> None:
        self._mine, self._asked = {}, None

    def agreed(self) -> str:
        """What any rank has found since the last call; the same on all."""
        if not self.asked:
            self.ask()
        mine, self._mine = self._mine, {}
        asked, self._asked = self._asked, None
        asked.wait()
        if not self._flag[0]:
            return ""
        try:
            everyone = allgather_object(mine, f"{self._name}.names", self._process_set)
        except JoinedError:
            return "something, nobody says what since a rank has joined"
        found = [
            f"{param} ({bucket}) on rank {rank}"
            for rank, theirs in zip(self._process_set.ranks, everyone)
            for bucket, param in theirs.items()
        ]
        return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def spoils(found: str, step: int, process_set: ProcessSet, skipped: str) -> bool:
    """Tells what any rank has found; whether it is not used. Alike on all ranks."""
    skips = bool(found) and world().config.check_finite == "skip"
    if found and process_set.rank() == 0:
        warn(f"step {step}: NaN or Inf in {found}{f'; {skipped}' if skips else ''}")
    return skips
