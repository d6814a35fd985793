"""Samplers that give all ranks about equally much to do at a time.

A *round* is one sample for each rank, neighbours in the order of complexity.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from bagua.common.errors import UsageError
from bagua.torch_api.world import get_rank, get_world_size


class LoadBalancingDistributedSampler(Sampler[int]):
    """This rank's share of a data set: in every round the ranks' samples are about equally complex.

    Call `set_epoch` before each epoch for another order.

    Args:
        dataset: has a length and samples by number; all are looked at once, now.
        complexity_fn: a number for each sample.
        num_replicas, rank: of the world, if not given.
        shuffle: draw the order of the rounds, and who gets which sample of one.
        seed: equal on all ranks.
        drop_last: leave samples out to make equal shares, in place of using some twice.
        random_level: 0 to 1, how far from balanced the rounds may be, for the sake of variety.
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[..., float],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        self.num_replicas = get_world_size() if num_replicas is None else num_replicas
        self.rank = get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise UsageError(f"rank {self.rank} is none of {self.num_replicas} replicas")
        if not 0 <= random_level <= 1:
            raise UsageError(f"random_level is from 0 to 1, not {random_level}")
        count = len(dataset)
        self.num_samples = (
            count // self.num_replicas if drop_last else -(-count // self.num_replicas)
        )
        if self.num_samples == 0:
            raise UsageError(f"{count} samples are none for each of {self.num_replicas} replicas")
        self.total_size = self.num_samples * self.num_replicas
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.drop_last = drop_last
        self._complexities = torch.tensor(
            [float(complexity_fn(dataset[i])) for i in range(count)], dtype=torch.float64
        )
        self._noise = float(self._complexities.max() - self._complexities.min()) * random_level

    def rounds(self) -> list[list[int]]:
        """This epoch's rounds; the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        kept = torch.arange(len(self._complexities))
        if self.shuffle:
            kept = kept[torch.randperm(len(kept), generator=generator)]
        kept = kept[: self.total_size]
        complexities = self._complexities[kept]
        if self.shuffle and self._noise:
            noise = torch.rand(len(kept), generator=generator, dtype=torch.float64)
            complexities = complexities + self._noise * noise
        order = kept[complexities.argsort(stable=True)].tolist()
        # What is missing is like its neighbours, so that the last round is balanced, too.
        repeated = itertools.cycle(order[-self.num_replicas :])
        order += itertools.islice(repeated, self.total_size - len(order))
        rounds = [order[i : i + self.num_replicas] for i in range(0, len(order), self.num_replicas)]
        if self.shuffle:
            rounds = [rounds[i] for i in torch.randperm(len(rounds), generator=generator).tolist()]
        return rounds

    def __iter__(self) -> Iterator[int]:
        return iter([samples[self.rank] for samples in self.rounds()])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of different sizes from the samples of a `LoadBalancingDistributedSampler`.

    All ranks have the same number of batches: those with fewer use some twice.

    Args:
        sampler: whose samples are batched.
        batch_fn: makes a list of batches of a list of samples.
        drop_last: leave batches out in place of using some twice.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise UsageError(
                f"a LoadBalancingDistributedSampler is needed, not {type(sampler).__name__}"
            )
        if sampler.drop_last:
            raise UsageError("drop_last is for the batches here, not for the sampler")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self._batch()

    def _batch(self) -> None:
        """Every rank batches for all, to know how many there are."""
        everyone = [self.batch_fn(list(samples)) for samples in zip(*self.sampler.rounds())]
        counts = [len(batches) for batches in everyone]
        if min(counts) == 0:
            raise UsageError(f"batch_fn made no batches for rank {counts.index(0)}")
        self.total_batch = min(counts) if self.drop_last else max(counts)
        mine = itertools.cycle(everyone[self.sampler.rank])
        self._batches = list(itertools.islice(mine, self.total_batch))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return self.total_batch

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        self._batch()
