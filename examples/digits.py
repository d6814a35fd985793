"""Train a small network on scikit-learn's handwritten digits, with any number of ranks.

    python examples/digits.py                  one rank
    bagua-run -np 2 python examples/digits.py  two, each on half of every epoch

The batch size is that of all ranks together, so both learn the same. Needs scikit-learn and tqdm.
"""

import argparse
import hashlib
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import bagua.torch as bagua

TEST_IMAGES = 360  # of 1797


def main() -> None:
    options = parse_arguments()
    bagua.init()
    torch.manual_seed(options.seed + bagua.rank())  # every rank draws its own dropout
    torch.set_num_threads(1)  # one core for each rank
    train, test = load_data()
    sampler = DistributedSampler(train, bagua.size(), bagua.rank(), seed=options.seed)
    loader = DataLoader(train, max(1, options.batch_size // bagua.size()), sampler=sampler)

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    optimizer = bagua.DistributedOptimizer(optimizer, model.named_parameters())
    bagua.broadcast_parameters(model.state_dict(), root_rank=0)

    start = time.perf_counter()
    progress = tqdm(total=options.epochs * len(loader), disable=bagua.rank() != 0)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            progress.update()
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    progress.close()
    seconds = time.perf_counter() - start

    correct = accuracy(model, test)
    equal = replicas_are_equal(model)
    if bagua.rank() == 0:
        took = f"{seconds:.1f} s of training, ranks: {bagua.size()}"
        print(f"test accuracy {correct:.1%} after {took}")
        print("all replicas are bitwise equal" if equal else "REPLICAS DIFFER")
    if not equal:
        raise SystemExit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Images of 8 x 8 pixels, shuffled alike on all ranks, for training and for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Each rank judges its share of the test images; the counts are summed."""
    model.eval()
    images, labels = (tensor[bagua.rank() :: bagua.size()] for tensor in test.tensors)
    correct = (model(images).argmax(1) == labels).sum()
    return bagua.allreduce(correct, op=bagua.Sum).item() / len(test)


def replicas_are_equal(model: nn.Module) -> bool:
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return len(set(bagua.allgather_object(hashlib.sha256(weights).hexdigest()))) == 1


if __name__ == "__main__":
    main()
