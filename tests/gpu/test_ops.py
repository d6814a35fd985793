"""The operations on tensors of a GPU."""

import pytest
import torch

pytestmark = pytest.mark.ranks(1, 2)


def spin() -> None:
    """Keeps the GPU busy, so that what does not wait for it is found out."""
    torch.cuda._sleep(20_000_000)


def test_allreduce_of_what_is_yet_to_be_computed(hvd):
    n, me = hvd.size(), hvd.rank()
    for count in (1, 1000, 3_000_001):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
            spin()
            values = torch.full((count,), me + 1, dtype=dtype, device="cuda")
            total = hvd.allreduce(values, op=hvd.Sum, name="sum")
            assert total.is_cuda
            assert (total == n * (n + 1) // 2).all()
            assert (values == me + 1).all()
            assert hvd.allreduce_(values, op=hvd.Max) is values
            assert (values == n).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_that_short_floats_do_not_have(hvd, dtype):
    n, me = hvd.size(), hvd.rank()
    for count in (1, 1001, 3_000_001):
        values = torch.full((count + 1,), float(3 * (me + 1)), dtype=dtype, device="cuda")[1:]
        spin()
        total = hvd.allreduce(values, op=hvd.Sum, name="third", postscale_factor=1 / 3)
        assert (total == n * (n + 1) // 2).all()
        hvd.allreduce_(values, op=hvd.Average, name="seventh", prescale_factor=1 / 7)
        expected = 3 * (n + 1) / 14
        assert (values.float() / expected - 1).abs().max() < 4e-3
        assert (values == values[0]).all()


def test_on_another_stream(hvd):
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            spin()
            values = torch.full((500_000,), 2.0, device="cuda")
            handle = hvd.allreduce_async_(values, op=hvd.Average)
            result = hvd.synchronize(handle) * 3
        side.synchronize()
        assert (result == 6).all()


def test_many_in_flight(hvd):
    tensors = [torch.full((n * 1000,), float(n), device="cuda") for n in range(1, 40)]
    handles = [hvd.allreduce_async_(t, name=f"t{i}", op=hvd.Sum) for i, t in enumerate(tensors)]
    for n, handle in enumerate(handles, 1):
        assert (hvd.synchronize(handle) == n * hvd.size()).all()


def test_moves(hvd):
    n, me = hvd.size(), hvd.rank()
    spin()
    rows = torch.full((me + 1, 3), float(me), device="cuda")
    gathered = hvd.allgather(rows)
    expected = torch.cat([torch.full((r + 1, 3), float(r)) for r in range(n)])
    assert gathered.is_cuda
    assert torch.equal(gathered.cpu(), expected)
    assert (hvd.broadcast(rows[:1], root_rank=n - 1) == n - 1).all()
    block = torch.arange(4.0 * n, device="cuda").view(2 * n, 2)
    assert torch.equal(hvd.reducescatter(block, op=hvd.Sum), n * block[2 * me : 2 * me + 2])
    received = hvd.alltoall(block)
    assert torch.equal(received, block[2 * me : 2 * me + 2].repeat(n, 1))


def test_results_belong_to_torch(hvd):
    side = torch.cuda.Stream()
    rows = torch.full((1_000_000,), 2.0, device="cuda")
    result = hvd.allgather(rows)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        spin()
        twice = result * 2
    result.record_stream(side)  # which still reads, though nobody has it any more
    del result
    for _ in range(3):
        hvd.allgather(rows.fill_(9))
    side.synchronize()
    assert (twice == 4).all()


def test_tensors_of_both_kinds_in_one_call(hvd):
    pair = [torch.ones(5, device="cuda"), torch.ones(7)]
    first, second = hvd.grouped_allreduce(pair, op=hvd.Sum)
    assert (first.is_cuda, second.is_cuda) == (True, False)
    assert (first == hvd.size()).all()
    assert (second == hvd.size()).all()


def test_gaps_and_sparse_tensors(hvd):
    matrix = torch.arange(12.0, device="cuda").view(3, 4)
    assert torch.equal(hvd.allreduce(matrix.t(), op=hvd.Average), matrix.t())
    sparse = torch.sparse_coo_tensor([[hvd.rank(), 2]], [1.0, 2.0], (4,), device="cuda")
    result = hvd.synchronize(hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Sum))
    assert result.is_cuda
    assert result.to_dense()[2] == 2 * hvd.size() + (hvd.rank() == 2)
