"""What an algorithm must not say when it is asked, and that it hears so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from bagua.algorithms import Algorithm, BucketInfo, ByteGrad, Exchange, LocalSGD, PerParameter
from bagua.algorithms.answers import FIXED, at_step, of_parameter, planned
from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp

BUCKET = BucketInfo("bucket", 0, "float32", 1000, 4000)
WORLD = SimpleNamespace(rank=0, size=2, local_size=2)


@dataclass(frozen=True)
class Says(Algorithm):
    answer: Any = None

    def plan(self, bucket, world, step):
        return self.answer

    def at(self, step):
        return self.answer

    def of(self, name, shape):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, r"Says\.plan returned None; it must return an Exchange"),
        (ByteGrad(), r"Says\.plan returned ByteGrad\(\); it must return an Exchange"),
        (Exchange(what="weight", when="step"), "returned what='weight', .* has what='grad': what,"),
        (Exchange(momentum_correction=0.9), "returned momentum_correction=0.9, .* has .*=0.0"),
    ],
)
def test_a_plan_that_cannot_be_carried_out(answer, words):
    with pytest.raises(UsageError, match=words):
        planned(Says(answer=answer), BUCKET, WORLD, 0)


def test_a_plan_that_changes_when_or_how_often():
    for change in ({"when": "forward"}, {"every": 2}):
        says = Says(what="delta", answer=Exchange(**{"what": "delta", "when": "step"} | change))
        with pytest.raises(UsageError, match=f"returned {next(iter(change))}="):
            planned(says, BUCKET, WORLD, 0)


def test_what_a_plan_may_vary():
    for answer in (Exchange(op=ReduceOp.Adasum), Exchange(codec="fp16"), Exchange(low_rank=2)):
        assert planned(Says(answer=answer), BUCKET, WORLD, 0) is answer
    fixed = {field: getattr(LocalSGD()._exchange(), field) for field in FIXED}
    answer = Exchange(**fixed, codec="fp16", outer_lr=0.5)
    same = replace(LocalSGD(), every=16)
    assert planned(same, BUCKET, WORLD, 0) == same._exchange()
    assert planned(Says(answer=answer, what="delta", every=16), BUCKET, WORLD, 0) is answer


def test_an_algorithm_of_a_step():
    with pytest.raises(UsageError, match=r"Says\.at returned 'topk'; it must return an Algorithm"):
        at_step(Says(answer="topk"), 3)
    assert at_step(Says(answer=LocalSGD()), 3) == LocalSGD()


def test_an_algorithm_of_a_parameter():
    def of(answer):
        return of_parameter(Says(answer=answer), "head.weight", (3, 4))

    with pytest.raises(UsageError, match=r"Says\.of returned None; it must return an Algorithm"):
        of(None)
    with pytest.raises(UsageError, match=r"Says\.of returned LocalSGD\(\) for head\.weight, with "):
        of(LocalSGD())
    assert of(ByteGrad()) == ByteGrad()
    mixed = PerParameter({"head.*": "topk"})
    assert of_parameter(mixed, "head.weight", (3, 4)) == find_topk()


def find_topk() -> Algorithm:
    return PerParameter({"*": "topk"}).of("any", ())
