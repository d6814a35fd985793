"""Which parameters share a bucket, and what happens to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from bagua.algorithms import Algorithm, BucketInfo, Exchange
from bagua.algorithms.answers import of_parameter, planned
from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp
from bagua.common.world import world
from bagua.torch.arrays import dtype_name
from bagua.torch.buckets import Bucket, Fold
from bagua.torch.low_rank import LowRankBucket
from bagua.torch.slot import Slot
from bagua.torch.standing import Standing
from bagua.torch.velocity import VelocityBucket

_FIRST_NBYTES = 1 << 20
_SMALL = 16  # times smaller than what comes after it
# That have names of their own. The engine remembers names, so they come round; those of weights do
# not, since it counts the rounds of what has peers by them.
_LAYOUTS = 8


class Plan:
    """What decides the buckets of one optimizer."""

    def __init__(
        self,
        standing: Standing,
        algorithm: Algorithm,
        op: ReduceOp | None,
        scales: tuple[float, float],
        wire_dtype: torch.dtype | None,
        bucket_nbytes: int,
        fold: Fold | None,
        step: int,
    ) -> None:
        self.prefix = standing.prefix
        self.standing = standing
        self.algorithm = algorithm
        self.op = op
        self.scales = scales
        self.process_set = standing.process_set
        self.wire_dtype = wire_dtype
        self.bucket_nbytes = bucket_nbytes
        self.fold = fold
        self.step = step  # that is next
        self.generation = 0  # of the buckets there are

    def buckets(self, runs: Sequence[Sequence[Slot]], cut: bool) -> list[Callable[[], Bucket]]:
        """What makes buckets over runs of slots, in order of readiness; `cut`: by size, too."""
        self.generation = self.standing.generation()
        with self.standing.planning():
            parts = [slots for run in runs for slots in self._split(run, cut)]
            return [self._bucket(index, slots) for index, slots in enumerate(parts)]

    def _split(self, run: Sequence[Slot], cut: bool) -> list[list[Slot]]:
        """The run by device, element type and algorithm, and by size.

        The first buckets are small, so that the exchange begins early; each is as large as all
        before it, until they have their size. A tensor that is too large for what is left of one
        takes along what is small beside it and came just before, as the biases of its layer: who
        waits for them waits for it.
        """
        done: list[list[Slot]] = []
        done_nbytes = 0
        filling: dict[tuple[torch.device, torch.dtype, bool, str], tuple[list[Slot], int]] = {}
        for slot in run:
            self.choose(slot)
            kind = (slot.param.device, slot.param.dtype, slot.exact, repr(slot.algorithm))
            slots, nbytes = filling.get(kind, ([], 0))
            more = slot.param.nbytes
            most = min(self.bucket_nbytes, max(_FIRST_NBYTES, done_nbytes))
            if cut and nbytes + more > most and (full := _large_until(slots, more // _SMALL)):
                done.append(slots[:full])
                done_nbytes += sum(s.param.nbytes for s in done[-1])
                slots = slots[full:]
                nbytes = sum(s.param.nbytes for s in slots)
            slots.append(slot)
            filling[kind] = (slots, nbytes + more)
        return done + [slots for slots, _ in filling.values()]

    def choose(self, slot: Slot) -> None:
        """The algorithm of this parameter, and whether it travels as it is all the same."""
        shape = tuple(slot.param.shape)
        slot.algorithm = of_parameter(self.algorithm, slot.name, shape)
        coded = slot.param.dtype in (torch.float32, torch.float16, torch.bfloat16)
        slot.exact = not coded or slot.algorithm.keeps_exact(slot.name, shape)

    def exchange_of(self, slot: Slot, info: BucketInfo) -> Exchange:
        """Of a bucket, whose slots have the algorithm of this one; or of this one alone."""
        exchange = planned(slot.algorithm, info, world(), self.step)
        if slot.exact:
            exchange = replace(exchange, codec="raw", error_feedback=None, low_rank=0)
        return exchange if self.op is None else replace(exchange, op=self.op)

    def _bucket(self, index: int, slots: Sequence[Slot]) -> Callable[[], Bucket]:
        # All of them are ready at the launch; the optimizer likes to find them in its own order.
        slots = sorted(slots, key=lambda slot: slot.number)
        dtype = slots[0].param.dtype
        if self.wire_dtype is not None and dtype.is_floating_point:
            dtype = self.wire_dtype
        count = sum(slot.param.numel() for slot in slots)
        name = f"{self.prefix}.bucket.{self.generation % _LAYOUTS}.{index}"
        info = BucketInfo(name, index, dtype_name(dtype), count, count * dtype.itemsize)
        exchange = self.exchange_of(slots[0], info)
        alone = self.process_set.size() == 1  # then nothing has to travel
        kind: type[Bucket] = Bucket
        if exchange.momentum_correction:
            kind = VelocityBucket
        elif exchange.low_rank and not alone:
            kind = LowRankBucket
        shared = self.scales, self.process_set, self.fold
        return partial(kind, name, info, slots, dtype, exchange, *shared)


def info_alone(name: str, param: torch.Tensor) -> BucketInfo:
    """What a plan is told of a parameter that has a bucket for itself, or none."""
    return BucketInfo(name, 0, dtype_name(param.dtype), param.numel(), param.nbytes)


def _large_until(slots: list[Slot], small_nbytes: int) -> int:
    """How many there are without the last ones, as many as are together as small as that."""
    count = len(slots)
    while count > 0 and slots[count - 1].param.nbytes <= small_nbytes:
        count -= 1
        small_nbytes -= slots[count].param.nbytes
    return count


def fold_of(optimizer: torch.optim.Optimizer, algorithm: Algorithm) -> Fold | None:
    """What makes momentum of gradients, where that is what travels."""
    if algorithm.momentum_correction:
        for group in optimizer.param_groups:
            if group.get("momentum") or "betas" in group:
                raise UsageError(
                    f"{algorithm!r} has a momentum of its own, before the exchange; use SGD with "
                    "momentum=0"
                )
    if algorithm.what != "momentum":
        return None
    fold = getattr(optimizer, "fold_gradients", None)
    if fold is None:
        raise UsageError(
            f"{algorithm.name or repr(algorithm)} exchanges the optimizer's momentum, which "
            f"{type(optimizer).__name__} does not offer; use bagua.torch.QAdam in its place"
        )
    return fold
