"""Ctrl-C at every line: who goes on neither waits for ever nor averages what is of other steps."""

from __future__ import annotations

import sys
from inspect import unwrap

import pytest
import torch
from torch import nn

from bagua.algorithms import AsyncModelAverage, Decentralized, GradientAllreduce, PowerSGD
from bagua.common.world import world
from bagua.torch import background, low_rank, mixing, pieces

pytestmark = pytest.mark.ranks(1, 2, 3)


class InterruptAt:
    """Raises a KeyboardInterrupt before the n-th line of these functions, as a signal would."""

    def __init__(self, functions, n: int) -> None:
        self._codes = {unwrap(function).__code__ for function in functions}
        self._left = n
        self.came = False

    def __enter__(self) -> InterruptAt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, *_) -> bool:
        sys.settrace(self._before)
        return kind is KeyboardInterrupt

    def _trace(self, frame, event, _):
        if frame.f_code not in self._codes:
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0 and not self.came:
                self.came = True
                raise KeyboardInterrupt
        return self._trace


LANDING = [pieces.Piece.land, pieces.land_all]
LAUNCHING = [pieces.launch_until, pieces.Piece.launch_weights, pieces.Piece.launch]
MIXING = [mixing.Mixing._start, mixing.Mixing._launch, mixing.Mixing._finish]
ALGORITHMS = {
    "step": (Decentralized(when="step", peers="all"), [*LANDING, *LAUNCHING, *MIXING]),
    "forward": (Decentralized(when="forward", peers="all"), [*LANDING, *LAUNCHING, *MIXING]),
    "background": (
        AsyncModelAverage(sync_interval_ms=0.0),
        [*LANDING, *LAUNCHING, background.Background._launch, background.Background._launch_rest],
    ),
}


@pytest.mark.parametrize("kind", list(ALGORITHMS))
def test_averages_of_weights(everyone, hvd, kind, monkeypatch):
    algorithm, functions = ALGORITHMS[kind]
    params = [nn.Parameter(torch.zeros(1 << 10)) for _ in range(3)]
    monkeypatch.setattr(mixing.Mixing, "_piece_nbytes", lambda self: 1.0)  # a piece each
    monkeypatch.setattr(background.Background, "_piece_nbytes", lambda self: 1.0)
    sgd = torch.optim.SGD(params, lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=algorithm)
    optimizer.step()
    optimizer.synchronize()  # so that whoever is interrupted has begun its step
    driver = optimizer._driver
    assert len(driver._pieces) == 3
    for n in range(1000):
        interrupt = InterruptAt(functions, n)
        for step in range(3):
            if kind == "background":
                optimizer.settle()  # what arrives later is not of these weights
            for number, param in enumerate(params):
                param.data.fill_(100.0 * step + 10 * number + everyone.me)
            if step == 0 and everyone.me == n % everyone.size:
                with interrupt:
                    optimizer.step()
                    optimizer.synchronize()
            else:
                optimizer.step()
            optimizer.synchronize()  # what is under way
        if kind == "background":
            optimizer.settle()
        launches = {piece.launch_count() for piece in driver._pieces}
        assert len(launches) == 1, f"line {n}"
        assert hvd.allgather_object(launches) == [launches] * everyone.size, f"line {n}"
        for number, param in enumerate(params):
            mean = 200 + 10 * number + (everyone.size - 1) / 2
            torch.testing.assert_close(param.data, torch.full_like(param, mean), rtol=1e-6, atol=0)
        if not any(hvd.allgather_object(interrupt.came)):
            break
    assert n > 10


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("algorithm", [PowerSGD(warmup_steps=0), GradientAllreduce()])
def test_gradients(everyone, hvd, algorithm, overlap, monkeypatch):
    monkeypatch.setattr(world(), "overlaps", lambda busy_threads: overlap)
    params = [nn.Parameter(torch.zeros(20, 30)), nn.Parameter(torch.zeros(20, 30))]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), algorithm=algorithm)
    bucket = low_rank.LowRankBucket
    functions = [bucket.start, bucket.advance, bucket._wait, *LANDING]
    told = []
    for n in range(1000):
        interrupt = InterruptAt(functions, n)
        for step in range(3):
            optimizer.zero_grad()
            loss = sum((p * 10.0**step * (everyone.me + 1)).sum() for p in params)
            if step == 0 and everyone.me == n % everyone.size:
                with interrupt:
                    loss.backward()
            else:
                try:
                    loss.backward()
                except hvd.UsageError as error:
                    told.append((step, str(error)))
            if step > 0:
                mean = 10**step * (everyone.size + 1) / 2
                for param in params:
                    goal = torch.full_like(param, mean)
                    torch.testing.assert_close(param.grad, goal, rtol=1e-2, atol=0)
                for theirs in hvd.allgather_object([param.grad for param in params]):
                    assert all(torch.equal(a, p.grad) for a, p in zip(theirs, params))
            optimizer.step() if step > 0 else optimizer.zero_grad()
        if not any(hvd.allgather_object(interrupt.came)):
            break
    assert all(step == 0 and "on this rank" in text for step, text in told)
    assert n > 10 or isinstance(algorithm, GradientAllreduce) or everyone.size == 1
