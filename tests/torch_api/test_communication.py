"""Every collective against what plain torch makes of all ranks' tensors."""

from __future__ import annotations

import functools

import pytest
import torch

from bagua.common.errors import UsageError

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
SHAPES = [(), (0,), (5,), (2, 3)]


def reduced(op, tensors):
    """The reduction by plain torch."""
    folds = {
        "BOR": torch.bitwise_or,
        "BAND": torch.bitwise_and,
        "BXOR": torch.bitwise_xor,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "PRODUCT": torch.mul,
    }
    if op.name in folds:
        return functools.reduce(folds[op.name], tensors)
    total = functools.reduce(torch.add, tensors)
    if op.name == "SUM":
        return total
    mode = None if total.is_floating_point() else "trunc"
    return torch.div(total, len(tensors), rounding_mode=mode).to(total.dtype)


def ops_for(bagua, dtype):
    ops = list(bagua.ReduceOp)
    if dtype.is_floating_point:
        ops = [op for op in ops if op.name not in ("BOR", "BAND", "BXOR")]
    return [op for op in ops if op.name != "AVG"] if dtype == torch.bool else ops


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(everyone, bagua, dtype):
    last = everyone.size - 1
    for op in ops_for(bagua, dtype):
        for shape in SHAPES:
            print(op, shape)
            tensors = everyone.draw(shape, dtype)
            mine, right = tensors[everyone.me], reduced(op, tensors)
            result = torch.zeros(shape, dtype=dtype)
            bagua.allreduce(mine, result, op=op)
            torch.testing.assert_close(result, right)
            in_place = mine.clone()
            bagua.allreduce_inplace(in_place, op)
            torch.testing.assert_close(in_place, right)

            result = torch.zeros(shape, dtype=dtype)
            bagua.reduce(mine, result if everyone.me == last else None, last, op)
            assert_only_on(everyone, last, result, right, torch.zeros(shape, dtype=dtype))
            in_place = mine.clone()
            bagua.reduce_inplace(in_place, last, op)
            assert_only_on(everyone, last, in_place, right, mine)


def assert_only_on(everyone, rank, result, right, elsewhere):
    torch.testing.assert_close(result, right if everyone.me == rank else elsewhere)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter(everyone, bagua, dtype):
    n = everyone.size
    for op in ops_for(bagua, dtype):
        tensors = everyone.draw((n, 3), dtype)
        right = reduced(op, tensors)
        result = torch.zeros(3, dtype=dtype)
        bagua.reduce_scatter(tensors[everyone.me], result, op)
        torch.testing.assert_close(result, right[everyone.me])
        in_place = tensors[everyone.me].clone()
        bagua.reduce_scatter_inplace(in_place, op)
        torch.testing.assert_close(in_place[0], right[everyone.me])
        assert torch.equal(in_place[1:], tensors[everyone.me][1:])


def test_several_tensors_are_reduced_as_one_request(everyone, bagua):
    floats, wholes = everyone.draw((3,)), everyone.draw((2, 2), torch.int32, seed=1)
    mine = [floats[everyone.me].clone(), wholes[everyone.me].clone()]
    bagua.allreduce_coalesced_inplace(mine, op=bagua.ReduceOp.MAX)
    assert torch.equal(mine[0], torch.stack(floats).amax(0))
    assert torch.equal(mine[1], torch.stack(wholes).amax(0))
    bits = [wholes[everyone.me].clone()]
    bagua.allreduce_coalesced_inplace(bits, op=bagua.ReduceOp.BXOR)
    assert torch.equal(bits[0], functools.reduce(torch.bitwise_xor, wholes))


def test_the_engines_own_reductions_mean_what_they_say(everyone, bagua):
    from bagua.common.kinds import Average

    result = torch.empty(2)
    bagua.allreduce(torch.full((2,), float(everyone.me)), result, op=Average)
    assert result.tolist() == [(everyone.size - 1) / 2] * 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_broadcast(everyone, bagua, shape):
    for dtype in DTYPES:
        print(dtype)
        check_broadcast(everyone, bagua, dtype, shape)


def check_broadcast(everyone, bagua, dtype, shape):
    last = everyone.size - 1
    tensors = everyone.draw(shape, dtype)
    for src in (0, last):
        tensor = tensors[everyone.me].clone()
        bagua.broadcast(tensor, src)
        assert torch.equal(tensor, tensors[src])
    pair = [tensors[everyone.me].clone(), torch.full((2,), float(everyone.me))]
    bagua.broadcast_coalesced(pair, src=last)
    assert torch.equal(pair[0], tensors[last])
    assert pair[1].tolist() == [last] * 2


def test_broadcast_to_a_parameter(everyone, bagua):
    param = torch.nn.Parameter(torch.full((3,), float(everyone.me)))
    bagua.broadcast(param)
    assert param.tolist() == [0] * 3
    assert param.requires_grad


def test_broadcast_object(everyone, bagua):
    last = everyone.size - 1
    mine = {"rank": everyone.me, "words": ["a"] * everyone.me}
    assert bagua.broadcast_object(mine, src=last) == {"rank": last, "words": ["a"] * last}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather_and_scatter(everyone, bagua, shape):
    for dtype in DTYPES:
        print(dtype)
        check_gather_and_scatter(everyone, bagua, dtype, shape)


def check_gather_and_scatter(everyone, bagua, dtype, shape):
    me, last = everyone.me, everyone.size - 1
    tensors = everyone.draw(shape, dtype)
    whole, mine = torch.stack(tensors), tensors[me]
    count = mine.numel()

    for target in (torch.zeros_like(whole), torch.zeros_like(whole).view(-1)):
        bagua.allgather(mine, target)
        assert torch.equal(target.view(whole.shape), whole)
    in_place = torch.zeros_like(whole)
    in_place[me] = mine
    bagua.allgather_inplace(in_place)
    assert torch.equal(in_place, whole)

    gathered = torch.zeros_like(whole)
    bagua.gather(mine, gathered if me == last else None, dst=last)
    assert torch.equal(gathered, whole if me == last else torch.zeros_like(whole))
    in_place = torch.zeros_like(whole)
    in_place[me] = mine
    bagua.gather_inplace(in_place if me == last else mine, count, dst=last)
    if me == last:
        assert torch.equal(in_place, whole)

    part = torch.zeros(shape, dtype=dtype)
    bagua.scatter(whole if me == last else None, part, src=last)
    assert torch.equal(part, mine)
    in_place = whole.clone() if me == last else torch.zeros(shape, dtype=dtype)
    bagua.scatter_inplace(in_place, count, src=last)
    assert torch.equal(in_place, whole if me == last else mine)


def test_alltoall(everyone, bagua):
    n, me = everyone.size, everyone.me
    tensors = everyone.draw((n, 2, 3), torch.int32)
    right = torch.stack([tensor[me] for tensor in tensors])
    result = torch.zeros_like(right)
    bagua.alltoall(tensors[me], result)
    assert torch.equal(result, right)
    in_place = tensors[me].clone()
    bagua.alltoall_inplace(in_place)
    assert torch.equal(in_place, right)


def test_alltoall_v(everyone, bagua):
    """Rank i sends i + j elements to rank j, from places with gaps between them."""
    n, me = everyone.size, everyone.me
    room = 2 * n
    tensors = everyone.draw((n, room))
    places = [room * rank for rank in everyone.ranks]
    send_counts = [me + rank for rank in everyone.ranks]
    result = torch.full((n * room,), -9.0)
    bagua.alltoall_v(tensors[me].view(-1), send_counts, places, result, send_counts, places)
    right = torch.full((n, room), -9.0)
    for rank in everyone.ranks:
        right[rank, : me + rank] = tensors[rank][me, : me + rank]
    assert torch.equal(result.view(n, room), right)

    in_place = tensors[me].clone()
    bagua.alltoall_v_inplace(in_place, send_counts, places)
    expected = torch.where(right == -9, tensors[me], right)
    assert torch.equal(in_place, expected)


def test_tensors_with_gaps(everyone, bagua):
    n, me = everyone.size, everyone.me
    tensors = everyone.draw((4, n))
    total = torch.stack(tensors).sum(0)
    result = torch.zeros(n, 4).t()
    bagua.allreduce(tensors[me].t().contiguous().t(), result)
    assert torch.equal(result, total)
    in_place = torch.zeros(n, 4).t()
    in_place.copy_(tensors[me])
    bagua.allreduce_inplace(in_place)
    assert torch.equal(in_place, total)
    in_place.copy_(tensors[me])
    bagua.reduce_scatter_inplace(in_place)
    flat = tensors[me].reshape(-1).clone()
    flat[:4] = total.reshape(n, 4)[me]
    assert torch.equal(in_place, flat.view(4, n))


def test_autograd_does_not_see_them(everyone, bagua):
    leaf = torch.ones(2, requires_grad=True)
    result = torch.zeros(2)
    bagua.allreduce(leaf * 2, result)
    assert not result.requires_grad
    assert result.tolist() == [2.0 * everyone.size] * 2


def test_what_cannot_be(everyone, bagua):
    n = everyone.size
    with pytest.raises(ValueError, match=f"no rank {n} in a group of {n}"):
        bagua.broadcast(torch.ones(1), src=n)
    with pytest.raises(ValueError, match="no rank -1"):
        bagua.gather(torch.ones(1), None, dst=-1)
    with pytest.raises(ValueError, match="op=5 is no reduction"):
        bagua.allreduce(torch.ones(1), torch.ones(1), op=5)
    with pytest.raises(ValueError, match="BAND is for integers"):
        bagua.allreduce_inplace(torch.ones(1), bagua.ReduceOp.BAND)
    with pytest.raises(ValueError, match="result is 2 elements of"):
        bagua.allreduce(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="has 2 of"):
        bagua.allreduce(torch.ones(2), torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="group made by new_group"):
        bagua.allreduce_inplace(torch.ones(2), comm="world")
    if n > 1:
        with pytest.raises(ValueError, match="equal parts"):
            bagua.alltoall_inplace(torch.ones(n + 1))
    with pytest.raises(ValueError, match="no part of a tensor"):
        bagua.alltoall_v(torch.ones(n), [2] * n, range(n), torch.ones(n), [2] * n, range(n))
    bagua.barrier()


def wrong_calls(bagua, n, last):
    """Each with what a rank gets wrong: `ok` is False on one rank."""
    ones, bits = torch.ones(n), torch.ones(n, dtype=torch.int64)
    each, starts = [1] * n, list(range(n))

    def v(sent=each, send_at=starts, received=each, receive_at=starts):
        bagua.alltoall_v(ones, sent, send_at, torch.ones(n), received, receive_at)

    return {
        "broadcast": lambda ok: bagua.broadcast(torch.ones(1), 0 if ok else n),
        "broadcast_object": lambda ok: bagua.broadcast_object(1, 0 if ok else -1),
        "scatter": lambda ok: bagua.scatter(ones if ok else torch.ones(n + 1), torch.ones(1), last),
        "scatter None": lambda ok: bagua.scatter(ones if ok else None, torch.ones(1), last),
        "scatter_inplace": lambda ok: bagua.scatter_inplace(ones, 1 if ok else -1, last),
        "reduce": lambda ok: bagua.reduce(ones, torch.ones(n) if ok else None, last),
        "reduce op": lambda ok: bagua.reduce(ones, torch.ones(n), last, 0 if ok else 5),
        "reduce bits": lambda ok: bagua.reduce_inplace(bits if ok else ones, last, 7),
        "gather": lambda ok: bagua.gather(torch.ones(1), torch.ones(n) if ok else None, last),
        "gather_inplace": lambda ok: bagua.gather_inplace(ones, 1 if ok else n + 1, last),
        "allreduce op": lambda ok: bagua.allreduce_inplace(torch.ones(1), 0 if ok else None),
        "reduce_scatter": lambda ok: bagua.reduce_scatter(
            ones if ok else torch.ones(n + 1), torch.ones(1)
        ),
        "reduce_scatter bits": lambda ok: bagua.reduce_scatter_inplace(bits if ok else ones, 8),
        "allgather_inplace": lambda ok: bagua.allgather_inplace(torch.ones(n + (not ok))),
        "alltoall": lambda ok: bagua.alltoall(torch.ones(n + (not ok)), torch.ones(n)),
        "send counts": lambda ok: v(sent=each if ok else [*each[1:], 1.5]),
        "send count": lambda ok: v(sent=each if ok else [*each[1:], -1]),
        "too few": lambda ok: v(sent=each if ok else each[1:]),
        "send place": lambda ok: v(send_at=starts if ok else [-1, *starts[1:]]),
        "receive place": lambda ok: v(receive_at=starts if ok else [*starts[1:], -1]),
        "receive too far": lambda ok: v(receive_at=starts if ok else [*starts[1:], n]),
    }


@pytest.mark.ranks(2, 3)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(everyone, bagua):
    """Or the next call would get the data of this one."""
    last = everyone.size - 1
    for what, call in wrong_calls(bagua, everyone.size, last).items():
        print(what)
        with pytest.raises(UsageError):
            call(everyone.me != last)
        number = torch.tensor([float(everyone.me)])
        bagua.broadcast(number, src=0)
        assert number.item() == 0
        bagua.allreduce_inplace(number.fill_(1))
        assert number.item() == everyone.size


@pytest.mark.ranks(2, 4)
def test_unequal_numbers_of_elements(everyone, bagua):
    """They may fill the result, in the wrong places."""
    n, odd = everyone.size, everyone.me % 2
    mine, result = torch.ones(3 if odd else 1), torch.zeros(2 * n)
    with pytest.raises(ValueError, match="not 1 as rank 0 and 3 as rank 1"):
        bagua.allgather(mine, result)
    if everyone.me == 1:
        with pytest.raises(ValueError, match="not 1 as rank 0 and 3 as rank 1"):
            bagua.gather(mine, result, dst=1)
    else:
        bagua.gather(mine, None, dst=1)
    assert not result.any()
    bagua.barrier()
