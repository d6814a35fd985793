"""Samplers that balance, and the batch normalization."""

from __future__ import annotations

import itertools

import pytest

from bagua.torch_api.contrib import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

pytestmark = pytest.mark.ranks(1)


def samplers(count, replicas, **keywords):
    data = [(7 * i) % count for i in range(count)]  # each complexity once
    return data, [
        LoadBalancingDistributedSampler(data, lambda x: x, replicas, rank, **keywords)
        for rank in range(replicas)
    ]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_all_samples_and_equally_many(shuffle, drop_last):
    for count, replicas in itertools.product([1, 2, 9, 10, 11], [1, 2, 3, 4]):
        print(count, replicas)
        if drop_last and count < replicas:
            with pytest.raises(ValueError, match="none for each of"):
                samplers(count, replicas, drop_last=True)
            continue
        _, ours = samplers(count, replicas, shuffle=shuffle, drop_last=drop_last)
        drawn = [list(sampler) for sampler in ours]
        each = count // replicas if drop_last else -(-count // replicas)
        assert [len(sampler) for sampler in ours] == [each] * replicas
        assert [len(mine) for mine in drawn] == [each] * replicas
        distinct = {index for mine in drawn for index in mine}
        assert len(distinct) == (each * replicas if drop_last else count)


def test_rounds_are_balanced():
    data, ours = samplers(23, 4)
    for epoch in range(3):
        for sampler in ours:
            sampler.set_epoch(epoch)
        for indices in zip(*ours):
            complexities = [data[index] for index in indices]
            assert max(complexities) - min(complexities) < 4


def test_epochs_differ_and_can_be_repeated():
    _, (sampler,) = samplers(20, 1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    _, (ordered,) = samplers(20, 1, shuffle=False)
    assert [(7 * i) % 20 for i in ordered] == list(range(20))


def test_a_random_level_loosens_the_balance():
    data, ours = samplers(400, 4, random_level=0.5)
    spreads = [max(data[i] for i in row) - min(data[i] for i in row) for row in zip(*ours)]
    assert 10 < sum(spreads) / len(spreads) < 250
    assert sorted(i for sampler in ours for i in sampler) == list(range(400))


def uneven(indices):
    """As many samples in a batch as the first one says."""
    batches = []
    while indices:
        size = 1 + indices[0] % 3
        batches.append(indices[:size])
        indices = indices[size:]
    return batches


@pytest.mark.parametrize("drop_last", [True, False])
def test_batches(drop_last):
    _, ours = samplers(40, 3)
    batched = [LoadBalancingDistributedBatchSampler(s, uneven, drop_last) for s in ours]
    for epoch in range(3):
        for sampler in batched:
            sampler.set_epoch(epoch)
        assert len({len(sampler) for sampler in batched}) == 1
        for sampler, plain in zip(batched, ours):
            batches = list(sampler)
            assert len(batches) == len(sampler)
            flat = [i for batch in batches for i in batch]
            assert set(flat) <= set(plain) if drop_last else set(flat) == set(plain)


def test_what_cannot_be():
    data, (sampler,) = samplers(4, 1, drop_last=True)
    with pytest.raises(ValueError, match="not for the sampler"):
        LoadBalancingDistributedBatchSampler(sampler, uneven)
    with pytest.raises(ValueError, match="a LoadBalancingDistributedSampler is needed, not list"):
        LoadBalancingDistributedBatchSampler(data, uneven)
    with pytest.raises(ValueError, match="rank 2 is none of 2"):
        LoadBalancingDistributedSampler(data, abs, 2, 2)
    with pytest.raises(ValueError, match="from 0 to 1"):
        LoadBalancingDistributedSampler(data, abs, 1, 0, random_level=2)
    _, (sampler,) = samplers(4, 1)
    with pytest.raises(ValueError, match="no batches for rank 0"):
        LoadBalancingDistributedBatchSampler(sampler, lambda indices: [])


def test_they_ask_the_world_for_what_is_not_said(bagua):
    sampler = LoadBalancingDistributedSampler([1, 2, 3], abs)
    assert (sampler.num_replicas, sampler.rank) == (bagua.get_world_size(), bagua.get_rank())


def test_batch_normalization_is_ours(bagua):
    from bagua.torch import SyncBatchNorm

    assert bagua.contrib.SyncBatchNorm is SyncBatchNorm
    assert bagua.contrib.sync_batchnorm.SyncBatchNorm is SyncBatchNorm
