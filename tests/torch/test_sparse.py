from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.ranks(1, 2, 3)


def embedding_gradient(rank, dtype=torch.float32):
    """Rows of a (10, 4) table, some of them twice; rank 1 has none."""
    rows = torch.tensor([rank, rank + 2, rank, 9] if rank != 1 else [], dtype=torch.int64)
    values = (torch.arange(len(rows) * 4).view(-1, 4) + 10 * rank).to(dtype)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, (10, 4))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
def test_sum_and_average(everyone, hvd, name):
    dtype = getattr(torch, name)
    tensors = [embedding_gradient(rank, dtype) for rank in everyone.ranks]
    total = sum(tensor.to_dense() for tensor in tensors)
    handle = hvd.sparse_allreduce_async(tensors[everyone.me], "sparse", hvd.Sum)
    result = hvd.synchronize(handle)
    assert result.is_sparse
    assert result.dtype == dtype
    assert result._nnz() == sum(tensor._nnz() for tensor in tensors)
    assert_close(result.to_dense(), total)
    if dtype.is_floating_point:
        average = hvd.sparse_allreduce_async(tensors[everyone.me], "sparse")()
        assert_close(average.to_dense(), total / everyone.size)


def test_gradients_of_an_embedding(everyone, hvd):
    table = torch.nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([everyone.me, 9])).sum().backward()
    result = hvd.synchronize(hvd.sparse_allreduce_async(table.weight.grad, "table", hvd.Sum))
    expected = torch.zeros(10, 4)
    expected[: everyone.size] = 1
    expected[9] = everyone.size
    assert_close(result.to_dense(), expected)


def test_two_sparse_dimensions(everyone, hvd):
    mine = torch.eye(3).to_sparse() * (everyone.me + 1)
    result = hvd.synchronize(hvd.sparse_allreduce_async(mine, "eye", hvd.Sum))
    assert_close(result.to_dense(), torch.eye(3) * sum(rank + 1 for rank in everyone.ranks))


def test_refusals(everyone, hvd):
    with pytest.raises(hvd.UsageError, match="a sparse COO tensor is needed"):
        hvd.sparse_allreduce_async(torch.eye(3), "dense")
    with pytest.raises(hvd.UsageError, match="Average or Sum, not Max"):
        hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "max", hvd.Max)


@pytest.mark.ranks(2)
def test_different_dense_shapes_are_noticed_on_every_rank(everyone, hvd):
    tensor = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 4), (5 + everyone.me, 4))
    handle = hvd.sparse_allreduce_async(tensor, "shapes")
    with pytest.raises(hvd.UsageError, match="ranks disagree on shape"):
        hvd.synchronize(handle)
