"""Gradients that travel alone: which do so may change, and none may be left out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm, ByteGrad
from bagua.common.errors import InternalError

pytestmark = pytest.mark.ranks(1, 2, 3)


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 8, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64))

    def forward(self, ids, uses_words: bool = True):
        return self.layers(self.words(ids) if uses_words else torch.ones(len(ids), 8))


class Trained:
    def __init__(self, everyone, hvd, sparse: bool, algorithm=None, **options) -> None:
        self.everyone, self.hvd, self.model = everyone, hvd, Words(sparse)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = hvd.DistributedOptimizer(
            sgd, self.model.named_parameters(), algorithm=algorithm, **options
        )

    def step(self, number: int, uses_words: bool = True) -> None:
        self.optimizer.zero_grad()
        ids = torch.tensor([1 + self.everyone.me, 5, 7 + number])
        self.model(ids, uses_words).square().mean().backward()
        self.optimizer.step()

    def state(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, state) -> None:
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(copy.deepcopy(state[1]))

    def assert_same_everywhere(self) -> None:
        mine = dict(self.model.state_dict())
        for theirs in self.hvd.allgather_object(mine):
            assert all(torch.equal(theirs[name], value) for name, value in mine.items())


@pytest.fixture(params=["sparse", "compressor"])
def words(request, hvd, own_compression):
    """What travels alone, for either reason, and the compression that it takes."""
    sparse = request.param == "sparse"
    return nn.Embedding(20, 8, sparse=sparse), hvd.Compression.none if sparse else own_compression


def test_takes_the_operation_of_its_own_algorithm(everyone, hvd, words):
    words, compression = words
    layer = nn.Linear(8, 4)
    named = [("words", words.weight), ("layer", layer.weight)]
    sums, means = Algorithm(op=hvd.Sum), Algorithm(op=hvd.Average)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param for _, param in named], lr=1.0),
        named,
        algorithm={"words": sums, "layer": means},
        compression=compression,
    )
    for _ in range(2):
        optimizer.zero_grad()
        (words(torch.tensor([3])).sum() + layer.weight.sum()).backward()
        grad = words.weight.grad.to_dense()
        assert (grad[3] == everyone.size).all()
        assert (grad[4] == 0).all()
        assert (layer.weight.grad == 1).all()


def test_is_not_summed_again(everyone, hvd, words):
    words, compression = words
    sgd = torch.optim.SGD(words.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Sum, compression=compression)
    words(torch.tensor([3])).sum().backward()
    with pytest.raises(hvd.UsageError, match="backward ran twice before step"):
        words(torch.tensor([3])).sum().backward()
    optimizer.zero_grad()
    words(torch.tensor([3])).sum().backward()
    optimizer.step()
    assert (words.weight.grad.to_dense()[3] == everyone.size).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("more", [1, 2])
def test_a_pass_too_many_meets_no_other_step(everyone, hvd, words, more):
    words, compression = words
    sgd = torch.optim.SGD(words.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, compression=compression)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for _ in range(1 + more if number == 1 and everyone.me == 0 else 1):
            words(torch.tensor([3 + everyone.me])).sum().backward()
        optimizer.step()

    def go_on() -> None:
        for number in range(1, 3):
            step(number)

    step(0)
    with pytest.raises(hvd.BaguaError, match=r"earlier exchanges in this step|gave up"):
        go_on()


BY_BYTES = ByteGrad(hierarchical=False)
WITH_ERRORS = ByteGrad(hierarchical=False, error_feedback=True)


@pytest.mark.parametrize("algorithm", [BY_BYTES, WITH_ERRORS], ids=["", "with errors"])
@pytest.mark.parametrize(("sparse", "as_dense"), [(True, False), (True, True), (False, False)])
def test_resumed_though_it_travels_otherwise(everyone, hvd, algorithm, sparse, as_dense):
    """A checkpoint's buckets do not have what was sparse then."""
    first = Trained(everyone, hvd, True, algorithm)
    for number in range(3):
        first.step(number)
    resumed = Trained(everyone, hvd, sparse, algorithm, sparse_as_dense=as_dense)
    resumed.load(first.state())
    for number in range(4):
        resumed.step(number)
    resumed.assert_same_everywhere()
    assert resumed.model.words.weight.grad.is_sparse is (sparse and not as_dense)


@pytest.mark.parametrize("resumes", [True, False])
def test_unused_at_first(everyone, hvd, resumes):
    """Nobody knows then that it is sparse, and it is no error to be silent about."""
    trained = Trained(everyone, hvd, True, BY_BYTES)
    if resumes:
        trained.step(0)
        state = trained.state()
        trained = Trained(everyone, hvd, True, BY_BYTES)
        trained.load(state)
    trained.step(1, uses_words=False)
    with pytest.raises(hvd.UsageError, match=r"words\.weight got a sparse gradient, and in its"):
        trained.step(2)


@pytest.mark.parametrize("algorithm", [BY_BYTES, WITH_ERRORS], ids=["", "with errors"])
def test_resumes_in_the_same_bits(everyone, hvd, algorithm):
    whole = Trained(everyone, hvd, True, algorithm)
    for number in range(4):
        whole.step(number)
    resumed = Trained(everyone, hvd, True, algorithm)
    resumed.load(whole.state())
    for number in range(4, 7):
        whole.step(number)
        resumed.step(number)
    whole.assert_same_everywhere()
    goals = whole.model.state_dict()
    assert all(torch.equal(goals[name], x) for name, x in resumed.model.state_dict().items())


def test_thawed(everyone, hvd):
    trained = Trained(everyone, hvd, True)
    words = trained.model.words.requires_grad_
    for number, trains_words in enumerate([True, True, False, True, True]):
        words(trains_words)
        trained.step(number)
    trained.assert_same_everywhere()
    assert trained.model.words.weight.grad.is_sparse


@pytest.mark.parametrize("only_here", [True, False])
def test_added(everyone, hvd, only_here):
    """Other ranks may not use it yet."""
    first = nn.Linear(8, 4)
    table = nn.Embedding(20, 8, sparse=True)
    hvd.broadcast_parameters([("w", first.weight), ("b", first.bias), ("t", table.weight)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        first(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    optimizer.add_param_group({"params": list(table.parameters())})
    before = table.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        loss = first(torch.ones(1, 8)).sum()
        if everyone.me == 0 or not only_here:
            loss = loss + table(torch.tensor([everyone.me, 9])).sum()
        loss.backward()
        optimizer.step()
    users = 1 if only_here else everyone.size
    moved = torch.zeros(20, 1)
    moved[:users] = 3 / everyone.size
    moved[9] = 3 * users / everyone.size
    torch.testing.assert_close(before - table.weight, moved.expand(20, 8))
    assert table.weight.grad.is_sparse


@pytest.mark.parametrize("times", [0, 2])
def test_a_gradient_that_is_not_exchanged_once_is_an_error_of_ours(everyone, hvd, times):
    layout = Trained(everyone, hvd, False).optimizer._driver.layout
    first, *rest = layout.slots.values()
    with pytest.raises(InternalError, match=f"{first.name} is exchanged {times} times in a step"):
        layout.rebuild([rest, *[[first]] * times])
