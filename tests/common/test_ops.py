"""Every operation on NumPy arrays and DLPack exporters."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
SHAPE = (5, 3)


@pytest.fixture(scope="session")
def bagua():
    import bagua

    bagua.init()
    return bagua


def draw(bagua, shape, dtype="float32", seed=0):
    """One array per rank; `shape` may be a function of the rank."""
    arrays = []
    for rank in range(bagua.size()):
        generator = np.random.default_rng(1000 * seed + rank)
        extents = shape(rank) if callable(shape) else shape
        values = generator.integers(0, 6, extents)
        if np.dtype(dtype).kind == "c":
            values = values + 1j * generator.integers(0, 6, extents)
        arrays.append(np.asarray(values % 2 if dtype == "bool" else values).astype(dtype))
    return arrays


def reduced(bagua, arrays, op):
    """The reduction by NumPy in a wide type. Values are small whole numbers: every sum is exact."""
    dtype = arrays[0].dtype
    wide = {"c": np.complex128, "f": np.float64}.get(dtype.kind, np.int64)
    stack = np.stack(arrays).astype(wide)
    if op == bagua.Average:
        total = stack.sum(0)
        average = total / len(arrays)
        return (np.trunc(average) if wide is np.int64 else average).astype(dtype)
    reduce = {
        bagua.Sum: np.sum,
        bagua.Product: np.prod,
        bagua.Min: np.min,
        bagua.Max: np.max,
    }[op]
    return reduce(stack, axis=0).astype(dtype)


def ops_for(bagua, dtype):
    ops = [bagua.Sum, bagua.Product, bagua.Average, bagua.Min, bagua.Max]
    if dtype == "bool":
        ops.remove(bagua.Average)
    return ops[:3] if dtype.startswith("complex") else ops


def check(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if expected.dtype.kind in "fc":
        rtol = 1e-3 if expected.dtype.itemsize == 2 else 1e-6
        assert_allclose(actual, expected, rtol=rtol)
    else:
        assert_array_equal(actual, expected)


def test_allreduce(bagua):
    for dtype in DTYPES:
        print(dtype)
        arrays = draw(bagua, SHAPE, dtype)
        mine = arrays[bagua.rank()]
        for op in ops_for(bagua, dtype):
            expected = reduced(bagua, arrays, op)
            source = mine.copy()
            check(bagua.allreduce(source, op=op), expected)
            check(bagua.synchronize(bagua.allreduce_async(source, op=op)), expected)
            check(bagua.grouped_allreduce([source, source], op=op)[1], expected)
            assert_array_equal(source, mine)
            assert bagua.allreduce_(source, op=op) is source
            check(source, expected)
            again = [mine.copy(), mine.copy()]
            bagua.synchronize(bagua.allreduce_async_(again[0], op=op))
            bagua.grouped_allreduce_(again[1:], op=op)
            for result in again:
                check(result, expected)


def test_allgather(bagua):
    for dtype in DTYPES:
        for rows in (lambda r: 2, lambda r: r, lambda r: 0):
            arrays = draw(bagua, lambda r, rows=rows: (rows(r), 3), dtype)
            mine = arrays[bagua.rank()]
            check(bagua.allgather(mine), np.concatenate(arrays))
            check(bagua.grouped_allgather([mine, mine])[1], np.concatenate(arrays))
    assert bagua.allgather(np.array(bagua.rank())).tolist() == list(range(bagua.size()))


def test_broadcast(bagua):
    for dtype in DTYPES:
        arrays = draw(bagua, SHAPE, dtype)
        for root in range(bagua.size()):
            mine = arrays[bagua.rank()].copy()
            check(bagua.broadcast(mine, root), arrays[root])
            assert bagua.broadcast_(mine, root) is mine
            check(mine, arrays[root])
            again = [arrays[bagua.rank()].copy()]
            bagua.grouped_broadcast_(again, root)
            check(again[0], arrays[root])


def test_alltoall(bagua):
    n, me = bagua.size(), bagua.rank()
    splits = [[(sender + 2 * receiver) % 3 for receiver in range(n)] for sender in range(n)]
    for dtype in DTYPES:
        arrays = draw(bagua, lambda rank: (sum(splits[rank]), 2), dtype)
        blocks = [np.split(a, np.cumsum(s)[:-1]) for a, s in zip(arrays, splits)]
        expected = np.concatenate([blocks[sender][me] for sender in range(n)])
        for mine in (splits[me], np.array(splits[me], np.int32)):
            result, received = bagua.alltoall(arrays[me], mine)
            check(result, expected)
            assert list(received) == [splits[sender][me] for sender in range(n)]
            assert type(received) is type(mine)
        even = draw(bagua, (2 * n, 2), dtype)
        check(bagua.alltoall(even[me]), np.concatenate([a[2 * me : 2 * me + 2] for a in even]))


def test_reducescatter(bagua):
    n, me = bagua.size(), bagua.rank()
    for dtype in DTYPES:
        for rows in (2 * n, n + 1, n - 1, 0):
            arrays = draw(bagua, (rows, 3), dtype)
            for op in ops_for(bagua, dtype):
                expected = np.array_split(reduced(bagua, arrays, op), n)[me]
                check(bagua.reducescatter(arrays[me], op=op), expected)
                check(bagua.grouped_reducescatter([arrays[me]], op=op)[0], expected)


def test_layouts(bagua):
    def layouts(base):
        yield base.copy().reshape(4, 6).T
        yield base.copy().reshape(4, 6)[::2, 1::2]
        yield base.copy()[::-1]
        yield np.asfortranarray(base.reshape(2, 3, 4))
        yield np.array(base[0])
        yield base[:0].copy()

    everyones = [list(layouts(array)) for array in draw(bagua, (24,))]
    for i, mine in enumerate(everyones[bagua.rank()]):
        expected = reduced(bagua, [arrays[i] for arrays in everyones], bagua.Sum)
        check(bagua.allreduce(mine, op=bagua.Sum), expected)
        assert bagua.allreduce_(mine, op=bagua.Sum) is mine
        check(mine, expected)


def test_lists_and_numbers_become_arrays(bagua):
    assert bagua.allreduce([1.0, 2.0], op=bagua.Sum).tolist() == [bagua.size(), 2 * bagua.size()]
    assert bagua.allreduce(bagua.rank(), op=bagua.Max).item() == bagua.size() - 1


def test_arrays_that_are_refused(bagua):
    frozen = np.ones(3)
    frozen.flags.writeable = False
    with pytest.raises(bagua.UsageError, match="writable"):
        bagua.allreduce_(frozen)
    check(bagua.allreduce(frozen), frozen)
    for bad in (np.array(["a"]), np.ones(3, np.uint16), np.ones(3, ">f4"), np.ones(3, object)):
        with pytest.raises(bagua.UsageError, match="cannot be exchanged"):
            bagua.allreduce(bad)
    assert bagua.allreduce(np.ones(1), op=bagua.Sum).item() == bagua.size()


class Exporter:
    """An array of some other library, of which nothing is known but DLPack."""

    def __init__(self, array) -> None:
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack(bagua):
    n, me = bagua.size(), bagua.rank()
    array = np.full((2, 3), me, np.float32)
    total = np.full((2, 3), sum(range(n)), np.float32)
    check(bagua.allreduce(Exporter(array), op=bagua.Sum), total)
    check(bagua.allgather(Exporter(array[:, 0]))[::2], np.arange(n, dtype=np.float32))
    exporter = Exporter(array)
    assert bagua.allreduce_(exporter, op=bagua.Sum) is exporter
    check(array, total)  # written through


if importlib.util.find_spec("ml_dtypes"):

    def test_bfloat16(bagua):
        import ml_dtypes

        array = np.full(5, 1.5 + bagua.rank(), ml_dtypes.bfloat16)
        total = bagua.allreduce(array, op=bagua.Sum)
        assert total.dtype == array.dtype
        assert total.astype(float).tolist() == [sum(1.5 + r for r in range(bagua.size()))] * 5
        assert bagua.allgather(array[:1]).dtype == array.dtype
