"""Every operation on torch tensors against what plain torch makes of all ranks' tensors."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.ranks(1, 2, 3, 4)
SHAPE = (5, 3)


def check(actual, expected):
    assert_close(actual, expected, equal_nan=True)


def check_sums(everyone, actual, expected):
    """Of values about 1."""
    for one, right in zip(actual, expected) if isinstance(actual, list) else [(actual, expected)]:
        twice = right.dtype in (torch.float16, torch.bfloat16) and everyone.shows_memory
        atol, rtol = (4 * torch.finfo(right.dtype).eps,) * 2 if twice else (None, None)
        assert_close(one, right, equal_nan=True, atol=atol, rtol=rtol)


# ---- allreduce ---------------------------------------------------------------------------------


def test_allreduce(everyone, hvd, dtypes):
    for dtype in dtypes:
        tensors = everyone.draw(SHAPE, dtype)
        mine = tensors[everyone.me]
        for op in everyone.ops_for(dtype):
            expected = everyone.reduced(tensors, op)
            source = mine.clone()
            check_sums(everyone, hvd.allreduce(source, op=op), expected)
            check_sums(everyone, hvd.synchronize(hvd.allreduce_async(source, op=op)), expected)
            assert torch.equal(source, mine)
            assert hvd.allreduce_(source, op=op) is source
            check_sums(everyone, source, expected)
            again = mine.clone()
            assert hvd.synchronize(hvd.allreduce_async_(again, op=op)) is again
            check_sums(everyone, again, expected)


def test_grouped_allreduce(everyone, hvd, dtypes):
    for dtype in dtypes:
        groups = [everyone.draw(SHAPE, dtype, seed=i) for i in range(2)]
        groups.append(everyone.draw((4,), torch.float32, seed=2))
        for op in everyone.ops_for(dtype):
            mine = [tensors[everyone.me].clone() for tensors in groups]
            expected = [everyone.reduced(tensors, op) for tensors in groups]
            check_sums(everyone, hvd.grouped_allreduce(mine, op=op), expected)
            check_sums(
                everyone, hvd.synchronize(hvd.grouped_allreduce_async(mine, op=op)), expected
            )
            again = [tensor.clone() for tensor in mine]
            check_sums(everyone, hvd.grouped_allreduce_(mine, op=op), expected)
            check_sums(everyone, mine, expected)
            hvd.synchronize(hvd.grouped_allreduce_async_(again, op=op))
            check_sums(everyone, again, expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_allreduce_leaves_the_same_bits_everywhere(everyone, hvd, name):
    dtype = getattr(torch, name)
    for op in (hvd.Sum, hvd.Average, hvd.Adasum):
        for count in (1, 7, 1000, 30000):
            result = hvd.allreduce(everyone.draw((count,), dtype)[everyone.me], op=op)
            bits = hvd.allgather(result.view(torch.uint8).unsqueeze(0))
            assert torch.equal(bits, bits[:1].expand_as(bits))


def test_16_bit_sums_round_once_on_one_machine(everyone, hvd):
    for dtype in (torch.float16, torch.bfloat16):
        tensors = everyone.draw((1000,), dtype)
        expected = torch.stack([tensor.float() for tensor in tensors]).sum(0).to(dtype)
        result = hvd.allreduce(tensors[everyone.me], op=hvd.Sum)
        # float32 sums in another order may round to the neighbour, no further
        ulp = torch.finfo(dtype).eps * expected.float().abs().clamp_min(1e-3)
        assert ((result.float() - expected.float()).abs() <= ulp).all()


def test_allreduce_adasum_of_equal_and_of_orthogonal_tensors(everyone, hvd):
    same = torch.arange(1.0, 5)
    check(hvd.allreduce(same, op=hvd.Adasum), same)  # the mean
    mine = torch.zeros(everyone.size)
    mine[everyone.me] = 3.0
    check(hvd.allreduce(mine, op=hvd.Adasum), torch.full((everyone.size,), 3.0))  # the sum


@pytest.mark.parametrize("name", ["int32", "float16", "float32", "complex64"])
def test_scales(everyone, hvd, name):
    dtype = getattr(torch, name)
    tensors = [tensor * 4 for tensor in everyone.draw(SHAPE, dtype)]
    for op in (hvd.Sum, hvd.Average):
        expected = everyone.reduced([wide_of(t) for t in tensors], op, 2.0, 0.25)
        actual = hvd.allreduce(
            tensors[everyone.me], op=op, prescale_factor=2.0, postscale_factor=0.25
        )
        if dtype == torch.int32:
            expected = expected.trunc()
        check(actual, expected.to(dtype))


def test_scaled_integers_are_divided_exactly_and_stay_within_their_type(everyone, hvd):
    def scaled(value, dtype, factor, **other):
        mine = torch.tensor([value if everyone.me == 0 else 0], dtype=dtype)
        return hvd.allreduce(mine, op=hvd.Sum, postscale_factor=factor, **other).item()

    assert scaled(2**54 + 2, torch.int64, 0.5) == 2**53 + 1
    assert scaled(2**54 + 2, torch.int64, 1 / 3, prescale_factor=0.5) == (2**53 + 1) // 3
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        assert scaled(limits.max, dtype, 4.0) == limits.max
        assert scaled(limits.max, dtype, -4.0) == limits.min
    large = torch.full((2,), 2**30, dtype=torch.int32)  # the sum itself does not have to fit
    result = hvd.allreduce(large, op=hvd.Sum, postscale_factor=1 / everyone.size)
    assert result.tolist() == [2**30] * 2


def wide_of(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def test_min_and_max_are_scaled_too(everyone, hvd):
    tensors = everyone.draw(SHAPE)
    expected = everyone.reduced(tensors, hvd.Max, -1.0, 3.0)
    actual = hvd.allreduce(
        tensors[everyone.me], op=hvd.Max, prescale_factor=-1.0, postscale_factor=3.0
    )
    check(actual, expected)


def test_average_keyword(everyone, hvd):
    tensors = everyone.draw(SHAPE)
    mine = tensors[everyone.me]
    with pytest.warns(FutureWarning, match="use op=Average or op=Sum"):
        check(hvd.allreduce(mine, False), everyone.reduced(tensors, hvd.Sum))
    with pytest.warns(FutureWarning):
        check(hvd.allreduce(mine, average=True), everyone.reduced(tensors, hvd.Average))
    check(hvd.allreduce(mine), everyone.reduced(tensors, hvd.Average))
    with pytest.raises(ValueError, match="either op or average"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="write op=Sum"):
        hvd.allreduce(mine, hvd.Sum)
    with pytest.raises(ValueError, match="write name='loss'"):
        hvd.allreduce_async(mine, "loss")


def layouts(base):
    """The same kind of values in memory of many kinds."""

    def grid():  # memory of its own each time
        return base.clone().view(2, 3, 4, 5)

    yield "channels_last", grid().contiguous(memory_format=torch.channels_last)
    yield "transposed", grid().transpose(0, 3)
    yield "strided", grid()[:, ::2, 1::3]
    yield "with an offset", grid()[1, 1:]
    yield "conjugate", torch.complex(grid(), grid() + 1).conj()
    yield "negative", torch.complex(grid(), grid() + 1).conj().imag
    yield "real part", torch.complex(grid(), grid() + 1).real
    yield "0-dim", grid()[0, 0, 0, 0]
    yield "no elements", grid()[:0]
    yield "leaf", torch.nn.Parameter(grid())
    yield "leaf with gaps", torch.nn.Parameter(grid().transpose(1, 2))


def test_layouts(everyone, hvd):
    everyones = [list(layouts(tensor)) for tensor in everyone.draw((120,))]
    for i, (label, mine) in enumerate(everyones[everyone.me]):
        tensors = [named[i][1].detach() for named in everyones]
        expected = everyone.reduced([tensor.resolve_conj() for tensor in tensors], hvd.Sum)
        with torch.no_grad():
            result = hvd.allreduce(mine, op=hvd.Sum)
        assert torch.allclose(result, expected), label
        assert result.shape == mine.shape, label
        stride, requires_grad = mine.stride(), mine.requires_grad
        assert hvd.allreduce_(mine, op=hvd.Sum) is mine, label
        assert torch.allclose(mine, expected), label
        assert (mine.stride(), mine.requires_grad) == (stride, requires_grad), label


def test_expanded_tensors_are_read_but_not_written(everyone, hvd):
    tensors = [t.expand(4, 3) for t in everyone.draw((3,))]
    check(hvd.allreduce(tensors[everyone.me]), everyone.reduced(tensors, hvd.Average))
    with pytest.raises(ValueError, match="expanded"):
        hvd.allreduce_(tensors[everyone.me])


def test_gaps_beside_an_in_place_result_stay_untouched(everyone, hvd):
    tensors = everyone.draw((6, 8))
    mine = tensors[everyone.me].clone()
    hvd.allreduce_(mine[1:5:2, 2:5], op=hvd.Sum)
    expected = tensors[everyone.me].clone()
    expected[1:5:2, 2:5] = everyone.reduced([t[1:5:2, 2:5] for t in tensors], hvd.Sum)
    check(mine, expected)


def test_nan_and_infinity_are_carried_through(everyone, hvd):
    inf, nan = float("inf"), float("nan")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        mine = torch.ones(5, dtype=dtype)
        if everyone.me == 0:
            mine[:3] = torch.tensor([nan, inf, -inf])
        if everyone.me == everyone.size - 1:
            mine[3] = inf
        total = hvd.allreduce(mine, op=hvd.Sum)
        assert total[0].isnan()
        assert total[1:4].isinf().all()
        assert total[4] == everyone.size
        for result in (hvd.broadcast(mine, 0), hvd.allgather(mine)[:5]):
            assert result[0].isnan()
            assert result[1].isinf()
        if not dtype.is_complex:
            for op in (hvd.Min, hvd.Max, hvd.Product):
                assert hvd.allreduce(mine, op=op)[0].isnan()
            assert hvd.allreduce(mine, op=hvd.Max)[1] == inf
            assert hvd.allreduce(mine, op=hvd.Min)[2] == -inf


# ---- allgather, broadcast ----------------------------------------------------------------------


def test_allgather(everyone, hvd, dtypes):
    for dtype in dtypes:
        for rows in (lambda r: 2, lambda r: r, lambda r: (everyone.size - r) % 3, lambda r: 0):
            tensors = everyone.draw(lambda r, rows=rows: (rows(r), 3), dtype)
            mine = tensors[everyone.me]
            expected = torch.cat(tensors)
            assert torch.equal(hvd.allgather(mine), expected)
            assert torch.equal(hvd.synchronize(hvd.allgather_async(mine)), expected)
            grouped = hvd.grouped_allgather([mine, torch.tensor([float(everyone.me)])])
            assert torch.equal(grouped[0], expected)
            assert grouped[1].tolist() == list(everyone.ranks)


def test_allgather_of_unusual_shapes(everyone, hvd):
    assert hvd.allgather(torch.tensor(everyone.me)).tolist() == list(everyone.ranks)
    assert hvd.allgather(torch.ones(2, 0)).shape == (2 * everyone.size, 0)
    tensors = everyone.draw((3, 4))
    gathered = hvd.allgather(tensors[everyone.me].t())
    assert torch.equal(gathered, torch.cat([t.t() for t in tensors]))


def test_gathered_memory_is_writable_and_outlives_its_handle(everyone, hvd):
    gathered = hvd.allgather(torch.full((1000,), float(everyone.me)))
    hvd.allgather(torch.full((1000,), -1.0))
    gathered += 1
    assert gathered.view(everyone.size, 1000)[:, 7].tolist() == [r + 1.0 for r in everyone.ranks]


def test_broadcast(everyone, hvd, dtypes):
    for dtype in dtypes:
        tensors = everyone.draw(SHAPE, dtype)
        for root in everyone.ranks:
            mine = tensors[everyone.me].clone()
            expected = tensors[root]
            assert torch.equal(hvd.broadcast(mine, root), expected)
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root)), expected)
            assert torch.equal(mine, tensors[everyone.me])
            again = mine.clone()
            assert hvd.broadcast_(mine, root) is mine
            assert hvd.synchronize(hvd.broadcast_async_(again, root)) is again
            assert torch.equal(mine, expected)
            assert torch.equal(again, expected)


def test_grouped_broadcast_of_mixed_types_and_layouts(everyone, hvd):
    groups = [everyone.draw(SHAPE, dtype) for dtype in (torch.int64, torch.bfloat16, torch.bool)]
    root = everyone.size - 1
    mine = [tensors[everyone.me].clone().t() for tensors in groups]
    hvd.grouped_broadcast_(mine, root)
    for tensor, tensors in zip(mine, groups):
        assert torch.equal(tensor, tensors[root].t())


# ---- alltoall, reducescatter -------------------------------------------------------------------


def test_alltoall(everyone, hvd, dtypes):
    for dtype in dtypes:
        n, me = everyone.size, everyone.me
        tensors = everyone.draw((2 * n, 3), dtype)
        expected = torch.cat([tensor[2 * me : 2 * me + 2] for tensor in tensors])
        assert torch.equal(hvd.alltoall(tensors[me]), expected)
        assert torch.equal(hvd.synchronize(hvd.alltoall_async(tensors[me])), expected)


def test_alltoall_with_splits(everyone, hvd, dtypes):
    for dtype in dtypes:
        n, me = everyone.size, everyone.me
        splits = [[(sender + receiver) % 3 for receiver in range(n)] for sender in range(n)]
        tensors = everyone.draw(lambda r, splits=splits: (sum(splits[r]), 2), dtype)
        blocks = [tensor.split(splits[sender]) for sender, tensor in enumerate(tensors)]
        expected = torch.cat([blocks[sender][me] for sender in range(n)])
        received = [splits[sender][me] for sender in range(n)]
        for mine in (
            splits[me],
            torch.tensor(splits[me]),
            torch.tensor(splits[me], dtype=torch.int32),
        ):
            result, counts = hvd.alltoall(tensors[me], mine)
            assert torch.equal(result, expected)
            assert counts.tolist() == received
            assert counts.dtype == (mine.dtype if isinstance(mine, torch.Tensor) else torch.int32)


def test_reducescatter(everyone, hvd, dtypes):
    for dtype in dtypes:
        for rows in (2 * everyone.size, everyone.size + 1, everyone.size - 1, 0):
            tensors = everyone.draw((rows, 3), dtype)
            mine = tensors[everyone.me]
            for op in everyone.ops_for(dtype):
                expected = everyone.share(everyone.reduced(tensors, op))
                check(hvd.reducescatter(mine, op=op), expected)
                check(hvd.synchronize(hvd.reducescatter_async(mine, op=op)), expected)
                check(hvd.grouped_reducescatter([mine, mine], op=op), [expected, expected])
                handle = hvd.grouped_reducescatter_async([mine], op=op)
                check(hvd.synchronize(handle), [expected])


def test_reducescatter_scales(everyone, hvd):
    tensors = everyone.draw((7, 2))
    for op in (hvd.Average, hvd.Max):
        expected = everyone.share(everyone.reduced(tensors, op, 0.5, 3.0))
        actual = hvd.reducescatter(
            tensors[everyone.me], op=op, prescale_factor=0.5, postscale_factor=3.0
        )
        check(actual, expected)


# ---- handles, names, join ----------------------------------------------------------------------


def test_many_in_flight_waited_in_another_order_than_started(everyone, hvd):
    mine = [torch.full((3,), float(i + everyone.me)) for i in range(20)]
    order = range(20) if everyone.me % 2 else reversed(range(20))
    handles = {i: hvd.allreduce_async(mine[i], name=f"many.{i}", op=hvd.Sum) for i in order}
    for i in range(20):
        expected = sum(i + r for r in everyone.ranks)
        assert hvd.synchronize(handles[i]).tolist() == [expected] * 3


def test_poll_tells_when_it_is_done(everyone, hvd):
    handle = hvd.allreduce_async(torch.ones(2), name="polled")
    while not hvd.poll(handle):
        pass
    assert hvd.poll(handle)
    assert hvd.synchronize(handle).tolist() == [1.0, 1.0]


def test_a_tensor_freed_in_flight_is_kept(everyone, hvd):
    handles = [
        hvd.allreduce_async(torch.full((1000,), 1.0 + i), name=f"freed.{i}", op=hvd.Sum)
        for i in range(20)
    ]
    rubbish = [torch.full((1000,), -1.0) for _ in range(20)]
    for i, handle in enumerate(handles):
        assert (hvd.synchronize(handle) == everyone.size * (1.0 + i)).all()
    assert all((other == -1).all() for other in rubbish)


def test_joined_ranks_count_as_zeros(everyone, hvd):
    batches = everyone.me + 1  # the last rank trains longest
    for batch in range(batches):
        total = hvd.allreduce(torch.ones(2), name="batch", op=hvd.Sum)
        assert total.tolist() == [float(everyone.size - batch)] * 2
        rows = hvd.allgather(torch.tensor([everyone.me]), name="rows")
        assert rows.tolist() == list(range(batch, everyone.size))
    assert hvd.join() == everyone.size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == everyone.size


def test_barrier_keeps_the_early_waiting(everyone, hvd):
    handle = hvd.allreduce_async(torch.ones(1), name="before the barrier")
    hvd.barrier()
    assert hvd.synchronize(handle).item() == 1.0


# ---- Horovod's signatures ----------------------------------------------------------------------

SCALES = ["prescale_factor", "postscale_factor"]
REDUCE = ["average", "name", "op", *SCALES, "process_set"]
REDUCE_SYNC = ["average", "name", "compression", "op", *SCALES, "process_set"]
SCATTER = ["name", "op", "process_set", *SCALES]
SCATTER_SYNC = ["name", "compression", "op", "process_set", *SCALES]
SIGNATURES = {
    "allreduce": ["tensor", *REDUCE_SYNC],
    "allreduce_async": ["tensor", *REDUCE],
    "allreduce_async_": ["tensor", *REDUCE],
    "grouped_allreduce": ["tensors", *REDUCE_SYNC],
    "grouped_allreduce_async": ["tensors", *REDUCE],
    "grouped_allreduce_async_": ["tensors", *REDUCE],
    "allgather": ["tensor", "name", "process_set"],
    "allgather_async": ["tensor", "name", "process_set"],
    "grouped_allgather": ["tensors", "name", "process_set"],
    "grouped_allgather_async": ["tensors", "name", "process_set"],
    "broadcast": ["tensor", "root_rank", "name", "process_set"],
    "broadcast_async": ["tensor", "root_rank", "name", "process_set"],
    "broadcast_async_": ["tensor", "root_rank", "name", "process_set"],
    "alltoall": ["tensor", "splits", "name", "process_set"],
    "alltoall_async": ["tensor", "splits", "name", "process_set"],
    "reducescatter": ["tensor", *SCATTER_SYNC],
    "reducescatter_async": ["tensor", *SCATTER],
    "grouped_reducescatter": ["tensors", *SCATTER_SYNC],
    "grouped_reducescatter_async": ["tensors", *SCATTER],
    "sparse_allreduce_async": ["tensor", "name", "op", "process_set"],
    "barrier": ["process_set"],
    "join": ["device", "process_set"],
}


@pytest.mark.ranks(1)
def test_positions_of_arguments_are_horovods(hvd):
    for name, expected in SIGNATURES.items():
        parameters = inspect.signature(getattr(hvd, name)).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == expected, name


@pytest.mark.ranks(2)
def test_positional_calls(everyone, hvd):
    mine = torch.full((4,), 2.0 * everyone.me + 1)
    everywhere = hvd.global_process_set
    none = hvd.Compression.none
    assert hvd.allreduce(mine, None, "a", none, hvd.Sum, 2.0, 0.5, everywhere)[0] == 4
    assert hvd.allreduce_(mine.clone(), None, "b", hvd.Sum, 2.0, 1.0, everywhere)[0] == 8
    assert hvd.grouped_allreduce_([mine.clone()], None, "c", hvd.Sum)[0][0] == 4
    assert hvd.reducescatter(mine, "d", none, hvd.Sum, everywhere, 1.0, 0.5).tolist() == [2, 2]
    assert hvd.broadcast_(mine.clone(), 1, "e", everywhere)[0] == 3
