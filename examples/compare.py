"""Three algorithms side by side, on scikit-learn's handwritten digits.

    bagua-run -np 2 python examples/compare.py

Every rank counts as a machine of its own here, so that messages, and codecs, are what they would be
between machines. Writes a plot of loss against steps and against bytes. Needs scikit-learn and
tqdm, and matplotlib for the plot.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from digits import accuracy, load_data, make_model, replicas_are_equal
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import bagua.torch as bagua

ALGORITHMS = ("gradient_allreduce", "bytegrad", "local_sgd")


def main() -> None:
    options = parse_arguments()
    bagua.init(transport="mpi")
    torch.set_num_threads(1)
    data = load_data()
    curves = {}
    say(f"{'algorithm':28}{'accuracy':>10}{'sent per step':>16}{'step':>10}")
    for name in options.algorithms:
        losses, sent, seconds, correct = train(name, data, options)
        curves[name] = losses, sent
        step = statistics.median(seconds)
        say(f"{name:28}{correct:10.1%}{sent / len(losses) / 1e3:13.1f} kB{step * 1e3:7.2f} ms")
    say("in the end all replicas are bitwise equal")
    if bagua.rank() == 0:
        draw(curves, options.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, metavar="name")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--plot", type=Path, default=Path("build/demo.png"))
    return parser.parse_args()


def train(algorithm, data, options):
    """Losses and seconds of every step, the bytes this rank sent, and the accuracy in the end."""
    train, test = data
    torch.manual_seed(0)  # the same weights for all algorithms
    model = make_model()
    optimizer = bagua.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=options.lr),
        model.named_parameters(),
        algorithm=algorithm,
    )
    sampler = DistributedSampler(train, bagua.size(), bagua.rank())
    loader = DataLoader(train, max(1, options.batch_size // bagua.size()), sampler=sampler)
    losses, seconds = [], []
    before = bagua.counters()["sent_nbytes"]
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
    sent = bagua.counters()["sent_nbytes"] - before
    optimizer.settle()  # replicas may differ between two exchanges
    if not replicas_are_equal(model):
        raise SystemExit(f"{algorithm}: REPLICAS DIFFER")
    return losses, sent, seconds, accuracy(model, test)


def say(line: str) -> None:
    if bagua.rank() == 0:
        print(line, flush=True)


def draw(curves, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        say("no plot without matplotlib: pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_bytes) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, (losses, sent) in curves.items():
        smooth = [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        by_step.plot(smooth, label=name)
        by_bytes.plot([sent * (i + 1) / len(losses) / 1e6 for i in range(len(losses))], smooth)
    by_step.set(xlabel="steps", ylabel="loss", yscale="log")
    by_bytes.set(xlabel="MB sent by a rank", xscale="log")
    by_step.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    say(f"loss against steps and bytes: {path}")


if __name__ == "__main__":
    main()
