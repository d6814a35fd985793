"""What buckets remember of each gradient until the next step, by parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.torch.buckets import Bucket
from bagua.torch.slot import Slot

Residuals = dict[Slot, list[torch.Tensor]]


def something(buckets: Sequence[Bucket]) -> bool:
    return any(slot.residuals for bucket in buckets for slot in bucket.slots)


def by_name(buckets: Sequence[Bucket]) -> dict[str, list[torch.Tensor]]:
    """Copies of it all."""
    slots = [slot for bucket in buckets for slot in bucket.slots]
    return {slot.name: [lost.clone() for lost in slot.residuals] for slot in slots}


def restore(state: dict[str, list[torch.Tensor]] | None, buckets: Sequence[Bucket]) -> None:
    """Makes it what is remembered; None forgets everything."""
    for bucket in buckets:
        for slot in bucket.slots:
            if state is None or slot.name not in state:  # it travelled alone, which loses nothing
                bucket.forget(slot)
                continue
            for lost, value in zip(slot.residuals, state[slot.name]):
                lost.copy_(value)


def carry_over(
    residuals: Residuals, buckets: Sequence[Bucket], before: Sequence[Sequence[Slot]]
) -> None:
    """Into buckets that were laid out anew, what does not depend on the layout.

    What was lost of means, or of what a node gave, stays behind where a bucket has other slots than
    any had before: another rank may encode them now.
    """
    as_before = {tuple(run) for run in before}
    for bucket in buckets:
        everything = tuple(bucket.slots) in as_before
        for slot in bucket.slots:
            old = residuals.get(slot, [])
            count = len(old) if everything else bucket.own_residuals
            for lost, value in zip(slot.residuals[:count], old):
                if lost.shape == value.shape:
                    lost.copy_(value)
