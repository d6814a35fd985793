"""Ctrl-C at any line: nobody waits for ever, or gets an average that is of several steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import bagua.torch
from bagua.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    GradientAllreduce,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
)
from bagua.common.world import world

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.slow]

SOURCES = str(Path(bagua.torch.__file__).parent)
# The code of everything that is in_one_piece; around it is what keeps the compiler away.
GUARDED = {bagua.torch.DistributedOptimizer.step.__wrapped__.__code__}


class InterruptAt:
    """Raises a KeyboardInterrupt before the n-th line in the middle of a step."""

    def __init__(self, n: int) -> None:
        self._left = n
        self._inside = 0  # such calls
        self.where = ""

    def __enter__(self) -> InterruptAt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, *_) -> bool:
        sys.settrace(self._before)
        torch.set_grad_enabled(True)  # between a block of no_grad and its end it comes too early
        return kind is KeyboardInterrupt

    def _trace(self, frame, event, _):
        if frame.f_code in GUARDED:
            self._inside += 1
            return self._trace_guard
        ours = self._inside > 0 and frame.f_code.co_filename.startswith(SOURCES)
        if not ours or "standing.py" in frame.f_code.co_filename or _is_final(frame):
            return None
        return self._trace_lines

    def _trace_guard(self, frame, event, _):
        self._inside -= event == "return"
        return self._trace_guard

    def _trace_lines(self, frame, event, _):
        if event == "line" and self._inside and not self.where:
            self._left -= 1
            if self._left < 0:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace_lines


def _is_final(frame) -> bool:
    """Whether it is in a `__del__`, out of which Python lets no interrupt come."""
    while frame and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class Gradients:
    """Steps that count as `number`, and what every rank gets by them."""

    def __init__(self, everyone, hvd, algorithm, set_to_none: bool) -> None:
        self.everyone, self.hvd, self.set_to_none = everyone, hvd, set_to_none
        self.params = [nn.Parameter(torch.zeros(n, 30)) for n in (1, 20, 6000)]
        self.sgd = torch.optim.SGD(self.params, lr=0.0)
        self.algorithm = algorithm

    def wrap(self):
        self.optimizer = self.hvd.DistributedOptimizer(self.sgd, algorithm=self.algorithm)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        sum((p * 10.0**number * (self.everyone.me + 1)).sum() for p in self.params).backward()
        self.optimizer.step()

    def check(self, number: int) -> None:
        mean = 10.0**number * (self.everyone.size + 1) / 2
        for param in self.params:
            goal = torch.full_like(param, mean)
            torch.testing.assert_close(param.grad, goal, rtol=1e-2, atol=0)


class Weights(Gradients):
    def step(self, number: int) -> None:
        for i, param in enumerate(self.params):
            param.data.fill_(100.0 * number + 10 * i + self.everyone.me)
        self.optimizer.step()
        if self.algorithm.when == "background":
            self.optimizer.settle()
        self.optimizer.synchronize()  # what is under way

    def check(self, number: int) -> None:
        if number == 0 or self.algorithm.codec != "raw":
            return  # all begin as the first rank; codecs come near the mean after many steps
        for i, param in enumerate(self.params):
            mean = 100 * number + 10 * i + (self.everyone.size - 1) / 2
            torch.testing.assert_close(param.data, torch.full_like(param, mean), rtol=1e-6, atol=0)


class Switches(Gradients):
    """They go on with another algorithm after the first step."""

    def __init__(self, everyone, hvd, algorithms) -> None:
        super().__init__(everyone, hvd, algorithms[0], True)
        self.other = algorithms[1]

    def step(self, number: int) -> None:
        if number == 1:
            self.optimizer.set_algorithm(self.other)
        super().step(number)

    def check(self, number: int) -> None:
        if (self.other if number else self.algorithm).what == "grad":
            super().check(number)


class Grows(Gradients):
    """A parameter is added after the first step."""

    def wrap(self):
        self.params = self.params[:3]
        self.sgd = torch.optim.SGD(self.params, lr=0.0)
        super().wrap()

    def step(self, number: int) -> None:
        if number == 1:
            self.params = [*self.params, nn.Parameter(torch.zeros(7))]
            self.optimizer.add_param_group({"params": self.params[3:]})
        super().step(number)

    def check(self, number: int) -> None:
        # Of an interrupt before it was added the optimizer knows nothing, and zeroes no gradient.
        self.params = [param for group in self.sgd.param_groups for param in group["params"]]
        if self.algorithm.what == "grad":
            super().check(number)


GRADIENTS = [GradientAllreduce(), ByteGrad(hierarchical=False), PowerSGD(warmup_steps=0)]
WEIGHTS = [
    Decentralized(when="step", peers="all"),
    Decentralized(when="forward", peers="all"),
    LowPrecisionDecentralized(hierarchical=False),
    LocalSGD(every=1),
    AsyncModelAverage(sync_interval_ms=0.0),
]


def name_of(algorithm) -> str:
    return f"{algorithm.name}-{algorithm.when}"


def interrupt_each(everyone, hvd, training, stride: int) -> None:
    """Interrupts a rank at every so many lines; then all hear so, and begin anew."""
    hvd, size = training.hvd, everyone.size
    for n in range(everyone.size % stride, 10_000, stride):
        victim, interrupt = n // stride % size, InterruptAt(n)
        training.wrap()
        told = ""
        try:
            for number in range(4):
                if everyone.me == victim and number < 2:
                    with interrupt:
                        training.step(number)
                else:
                    training.step(number)
                if not interrupt.where:
                    training.check(number)
        except hvd.BaguaError as error:
            told = str(error)
        where = hvd.allgather_object(interrupt.where)[victim]
        if not where:
            assert not told
            break
        if size > 1:
            assert f"rank {victim} was interrupted in the middle of a step" in told or (
                everyone.me == victim and "this rank was interrupted" in told
            ), where
        else:
            assert not told, where
            training.check(3)
    assert n > 60


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("algorithm", GRADIENTS, ids=name_of)
def test_gradients(everyone, hvd, algorithm, overlap, set_to_none, monkeypatch):
    monkeypatch.setattr(world(), "overlaps", lambda busy_threads: overlap)
    training = Gradients(everyone, hvd, algorithm, set_to_none)
    interrupt_each(everyone, hvd, training, 47)


@pytest.mark.parametrize("algorithm", WEIGHTS, ids=name_of)
def test_averages_of_weights(everyone, hvd, algorithm):
    stride = 59 if algorithm.when == "background" else 29
    interrupt_each(everyone, hvd, Weights(everyone, hvd, algorithm, True), stride)


SWITCHES = [
    (GradientAllreduce(), ByteGrad(hierarchical=False)),
    (GradientAllreduce(), LocalSGD(every=1)),
    (LocalSGD(every=1), GradientAllreduce()),
    (AsyncModelAverage(sync_interval_ms=0.0), Decentralized(when="step", peers="all")),
]


@pytest.mark.parametrize("algorithms", SWITCHES, ids=lambda pair: "-".join(map(name_of, pair)))
def test_another_algorithm(everyone, hvd, algorithms):
    stride = 97 if algorithms[0].when == "background" else 61
    interrupt_each(everyone, hvd, Switches(everyone, hvd, algorithms), stride)


@pytest.mark.parametrize("algorithm", [GradientAllreduce(), LocalSGD(every=1)], ids=name_of)
def test_a_parameter_that_is_added(everyone, hvd, algorithm):
    interrupt_each(everyone, hvd, Grows(everyone, hvd, algorithm, True), 61)
