"""Bagua's names and arguments, and what becomes of them."""

from __future__ import annotations

import pytest

from bagua.common.kinds import Average, Sum

pytestmark = pytest.mark.ranks(1)


def test_gradient_allreduce(bagua):
    from bagua.algorithms import GradientAllreduce

    kind = bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm
    assert kind().made() == GradientAllreduce(op=Average, hierarchical=False)
    assert kind(True, False).made() == GradientAllreduce(op=Sum, hierarchical=True)


def test_bytegrad(bagua):
    from bagua.algorithms import ByteGrad

    kind = bagua.algorithms.bytegrad.ByteGradAlgorithm
    assert kind().made() == ByteGrad()
    assert kind(hierarchical=False, average=False).made() == ByteGrad(op=Sum, hierarchical=False)


def test_by_name(bagua):
    init = bagua.algorithms.Algorithm.init
    algorithms = bagua.algorithms
    assert init("bytegrad", hierarchical=False) == algorithms.bytegrad.ByteGradAlgorithm(False)
    for name, kind in {
        "gradient_allreduce": algorithms.gradient_allreduce.GradientAllReduceAlgorithm,
        "bytegrad": algorithms.bytegrad.ByteGradAlgorithm,
        "decentralized": algorithms.decentralized.DecentralizedAlgorithm,
        "low_precision_decentralized": algorithms.decentralized.LowPrecisionDecentralizedAlgorithm,
        "async": algorithms.async_model_average.AsyncModelAverageAlgorithm,
    }.items():
        assert type(init(name)) is kind


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bytegard", "bytegrad"),
        ("gradient_all_reduce", "gradient_allreduce"),
        ("q_adam", "qadam"),
        ("low_precision", "low_precision_decentralized"),
    ],
)
def test_a_misspelt_name(bagua, name, meant):
    with pytest.raises(ValueError, match=f"unknown algorithm '{name}'; did you mean '{meant}'"):
        bagua.algorithms.Algorithm.init(name)


def test_a_mode_that_is_not_known(bagua):
    with pytest.raises(ValueError, match="peer_selection_mode='shift_one' is not known"):
        bagua.algorithms.async_model_average.AsyncModelAverageAlgorithm("shift_one")
