"""An algorithm of one's own: average small buckets, combine large ones by Adasum.

bagua-run -np 2 python examples/new_algorithm.py
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

import torch

import bagua.torch as bagua
from bagua.algorithms import Algorithm, BucketInfo, Exchange, register


@register
@dataclass(frozen=True)
class AdasumForLarge(Algorithm):
    """Adasum costs log2(ranks) whole vectors: spend that where most of the parameters are."""

    from_nbytes: int = 4096
    name: ClassVar[str] = "adasum_for_large"

    # Asked when buckets are made, not in every step, and the same on every rank. What changes from
    # step to step says `at(step)`, which returns another algorithm.
    def plan(self, bucket: BucketInfo, world, step: int) -> Exchange:
        large = bucket.nbytes >= self.from_nbytes
        return Exchange(op=bagua.Adasum if large else bagua.Average)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    bagua.init(bucket_mb=0.01)  # more than one bucket, for so small a model
    torch.manual_seed(bagua.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    bagua.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = bagua.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), algorithm=AdasumForLarge(from_nbytes=8192)
    )
    inputs = torch.randn(256, 64)  # every rank has its own
    for _ in range(options.epochs):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()

    losses = bagua.allgather_object(loss.item())
    weights = bagua.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
    if bagua.rank() == 0:
        print("loss on each rank:", ", ".join(f"{loss:.4f}" for loss in losses))
        print("all replicas are bitwise equal" if (weights == weights[0]).all() else "THEY DIFFER")


if __name__ == "__main__":
    main()
