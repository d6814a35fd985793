"""What learning.py trains: a small convolutional network, and a small language model.

Both have data that comes with a package that is there anyway: scikit-learn's digits, and the
sources of Python's standard library. Batches are those of all ranks together.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Union

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets


class Digits:
    """1797 images of 8 x 8 pixels. The seed decides which of them are for testing, too."""

    name = "digits"
    seeds = 2  # 360 test images are few
    steps = 1200
    batch = 24
    rates: ClassVar = {"sgd": 0.04, "adam": 2e-3}
    measured = "test accuracy"

    def __init__(self, seed: int) -> None:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        self._generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labels), generator=self._generator)
        self._test = images[order[:360]], labels[order[:360]]
        self._train = images[order[360:]], labels[order[360:]]

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def batches(self, steps: int) -> Iterator[Batch]:
        images, labels = self._train
        for _ in range(steps):
            which = torch.randperm(len(labels), generator=self._generator)[: self.batch]
            yield images[which], labels[which]

    def score(self, model: nn.Module) -> float:
        """The share of test images that is recognized."""
        images, labels = self._test
        return float((model(images).argmax(1) == labels).float().mean())

    @staticmethod
    def shown(score: float) -> str:
        return f"{score:.2%}"

    @staticmethod
    def lost(score: float, reference: float) -> float:
        """How much worse; relative to nothing."""
        return reference - score

    @staticmethod
    def allowed(algorithm: str) -> float:
        return 0.01


class Text:
    """Python's standard library, character by character; every tenth file is for validation."""

    name = "text"
    seeds = 1
    steps = 600
    batch = 12
    rates: ClassVar = {"sgd": 0.15, "adam": 3e-3}
    measured = "validation loss"
    context = 64

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._train, validation = _sources()
        starts = torch.arange(0, len(validation) - self.context - 1, len(validation) // 256)
        self._validation = self._windows(validation, starts)

    def model(self) -> nn.Module:
        return Transformer(vocabulary=128, width=64, depth=2, heads=4, context=self.context)

    def batches(self, steps: int) -> Iterator[Batch]:
        last = len(self._train) - self.context - 1
        for _ in range(steps):
            starts = torch.randint(last, (self.batch,), generator=self._generator)
            yield self._windows(self._train, starts)

    def score(self, model: nn.Module) -> float:
        """Nats a character, in 256 places."""
        inputs, targets = self._validation
        return float(loss_of(model(inputs), targets))

    @staticmethod
    def shown(score: float) -> str:
        return f"{score:.4f}"

    @staticmethod
    def lost(score: float, reference: float) -> float:
        return score / reference - 1

    @staticmethod
    def allowed(algorithm: str) -> float:
        seldom = ("sign1", "topk", "local_sgd", "local_sgd_forward", "diloco", "diloco_short")
        return 0.05 if algorithm in seldom else 0.02

    def _windows(self, text: torch.Tensor, starts: torch.Tensor) -> Batch:
        windows = text[starts.unsqueeze(1) + torch.arange(self.context + 1)]
        return windows[:, :-1], windows[:, 1:]


Task = Union[Digits, Text]
TASKS: dict[str, type[Task]] = {task.name: task for task in (Digits, Text)}


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@lru_cache
def _sources() -> tuple[torch.Tensor, torch.Tensor]:
    """Characters for training and for validation, as numbers below 128."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text("ascii", errors="replace") for file in files]
    codes = [torch.tensor([min(ord(c), 127) for c in text]) for text in texts]
    return torch.cat([c for i, c in enumerate(codes) if i % 10]), torch.cat(codes[::10])


class Transformer(nn.Module):
    """Predicts the next character at every place."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.embedding(characters) + self.places
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(n, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        longer: torch.Tensor = x + self.mlp(self.norms[1](x))
        return longer
