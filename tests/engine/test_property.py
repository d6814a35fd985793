"""Random programs over MPI processes: always the right results, never a hang.

All ranks draw the same program; each submits the named operations in an order of its own and waits
for all in another one. NumPy tells what every result must be.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

KINDS = ["allreduce", "allreduce_", "grouped", "allgather", "broadcast", "alltoall", "scatter"]
DTYPES = ["uint8", "int32", "int64", "float16", "float32", "float64", "complex64"]
OPS = ["Sum", "Average", "Min", "Max", "Product"]


@dataclass(frozen=True)
class Operation:
    kind: str
    named: bool
    set: int  # taken modulo the number of sets, as the other numbers are
    rows: tuple[int, ...]
    dtype: str
    op: str
    root: int
    prescale: float
    seed: int

    def tensors(self, rank: int) -> list[np.ndarray]:
        """What a rank of the world puts in; every rank can compute everybody's."""
        rng = np.random.default_rng([self.seed, rank])
        low = 0 if self.dtype == "uint8" else -3
        arrays = []
        for rows in self.rows if self.kind == "grouped" else self.rows[:1]:
            if self.kind == "allgather":
                rows = (rows + rank) % 5
            if self.kind == "alltoall":
                rows = sum(self.splits(rank))
            shape = (rows, 2) if self.kind in ("allgather", "alltoall", "scatter") else (rows,)
            values = rng.integers(low, 4, shape)
            if self.dtype == "complex64":
                values = values + 1j * rng.integers(low, 4, shape)
            arrays.append(values.astype(self.dtype))
        return arrays

    def splits(self, rank: int) -> list[int]:
        """Rows that a rank sends to each rank of the world."""
        return [(self.rows[0] + 3 * rank + to) % 4 for to in range(8)]

    @property
    def reduction(self) -> str:
        """The drawn one where the type has it."""
        no_order = self.dtype == "complex64" and self.op in ("Min", "Max")
        return "Sum" if no_order else self.op

    @property
    def scale(self) -> float:
        return self.prescale if self.dtype in ("float32", "float64") else 1.0


rows = st.sampled_from([0, 1, 2, 3, 7, 100, 3000, 70000])
operations = st.builds(
    Operation,
    kind=st.sampled_from(KINDS),
    named=st.booleans(),
    set=st.integers(0, 11),
    rows=st.lists(rows, min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(OPS),
    root=st.integers(0, 11),
    prescale=st.sampled_from([1.0, 0.5, 2.0]),
    seed=st.integers(0, 5),  # few, so that requests come again and travel as bits
)
programs = st.lists(st.lists(operations, min_size=1, max_size=8), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def bagua():
    import bagua

    bagua.init()
    return bagua


@pytest.fixture(scope="module")
def sets(bagua):
    """The world and sets that overlap it and each other, also of one rank."""
    n = bagua.size()
    wanted = [range(n - 1), range(1, n), range(0, n, 2), [n - 1]]
    unique = sorted({tuple(ranks) for ranks in wanted if 0 < len(ranks) < n})
    added = [bagua.add_process_set(list(ranks)) for ranks in unique]
    yield [bagua.global_process_set, *added]
    for process_set in added:
        bagua.remove_process_set(process_set)


def reduced(operation: Operation, arrays: list[np.ndarray]) -> np.ndarray:
    """In the widest type, rounded once."""
    dtype, op = np.dtype(operation.dtype), operation.reduction
    wide = {"u": np.int64, "i": np.int64, "f": np.float64, "c": np.complex128}[dtype.kind]
    stack = np.stack(arrays).astype(wide)
    if op in ("Sum", "Average"):
        result = stack.sum(0) * operation.scale
    else:
        scaled = stack * operation.scale
        result = {"Min": np.min, "Max": np.max, "Product": np.prod}[op](scaled, axis=0)
    if op == "Average":
        result = result / len(arrays)
        if dtype.kind in "ui":
            result = np.trunc(result)
    if dtype.kind in "ui":
        result = result.astype(np.int64)
    return result.astype(dtype)


class Rank:
    """Runs programs as one rank of the world."""

    def __init__(self, bagua, sets) -> None:
        self.bagua, self.sets = bagua, sets
        self.me = bagua.rank()

    def start(self, operation: Operation, name):
        """Submits; returns what waits for the operation and compares."""
        bagua, kind = self.bagua, operation.kind
        process_set = self.sets[operation.set % len(self.sets)]
        members = process_set.ranks
        mine = operation.tensors(self.me)
        common = {"name": name, "process_set": process_set}
        op = {
            "op": getattr(bagua, operation.reduction),
            "prescale_factor": operation.scale,
        }
        if kind == "allreduce":
            handle = bagua.allreduce_async(mine[0], **op, **common)
        elif kind == "allreduce_":
            handle = bagua.allreduce_async_(mine[0], **op, **common)
        elif kind == "grouped":
            handle = bagua.grouped_allreduce_async(mine, **op, **common)
        elif kind == "allgather":
            handle = bagua.allgather_async(mine[0], **common)
        elif kind == "broadcast":
            handle = bagua.broadcast_async(mine[0], self.root(operation), **common)
        elif kind == "alltoall":
            splits = operation.splits(self.me)
            mine[0] = mine[0][: sum(splits[to] for to in members)]
            handle = bagua.alltoall_async(mine[0], [splits[to] for to in members], **common)
        else:
            handle = bagua.reducescatter_async(mine[0], **op, **common)
        return lambda: self.compare(operation, members, bagua.synchronize(handle))

    def root(self, operation: Operation) -> int:
        members = self.sets[operation.set % len(self.sets)].ranks
        return members[operation.root % len(members)]

    def compare(self, operation: Operation, members: list[int], result) -> None:
        expected = self.oracle(operation, members)
        if operation.kind == "alltoall":
            result, splits = result
            assert list(splits) == [operation.splits(rank)[self.me] for rank in members]
        found = result if operation.kind == "grouped" else [result]
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert one.dtype == other.dtype
            # Everything here is exact but a division of complex numbers.
            tolerance = 1e-6 if operation.dtype == "complex64" else 0
            np.testing.assert_allclose(one, other, rtol=tolerance, err_msg=str(operation))

    def oracle(self, operation: Operation, members: list[int]) -> list[np.ndarray]:
        inputs = [operation.tensors(rank) for rank in members]
        if operation.kind == "allgather":
            return [np.concatenate([arrays[0] for arrays in inputs])]
        if operation.kind == "broadcast":
            return operation.tensors(self.root(operation))
        if operation.kind == "alltoall":
            blocks = []
            for rank, arrays in zip(members, inputs):
                splits = operation.splits(rank)
                begin = sum(splits[to] for to in members if to < self.me)
                blocks.append(arrays[0][begin : begin + splits[self.me]])
            return [np.concatenate(blocks)]
        results = [reduced(operation, list(arrays)) for arrays in zip(*inputs)]
        if operation.kind == "scatter":
            place = members.index(self.me)
            return [np.array_split(results[0], len(members))[place]]
        return results

    def run(self, batch: list[Operation], shuffle: random.Random) -> None:
        mine = [
            (operation, f"op {i}" if operation.named else None)
            for i, operation in enumerate(batch)
            if self.me in self.sets[operation.set % len(self.sets)].ranks
        ]
        # Unnamed operations match by their order, so only the named ones change places.
        order = list(range(len(mine)))
        places = [i for i in order if mine[i][1] is not None]
        for place, i in zip(places, shuffle.sample(places, len(places))):
            order[place] = i
        finishes = [self.start(*mine[i]) for i in order]
        shuffle.shuffle(finishes)
        errors = []
        for finish in finishes:
            try:
                finish()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        assert not errors, "\n".join(errors)


@pytest.mark.ranks(1, 2, 3, 4, timeout_s=120)
def test_random_programs(bagua, sets, ranks):
    from mpi4py import MPI

    rank = Rank(bagua, sets)
    counter = itertools.count()

    @settings(max_examples=60, phases=[Phase.generate, Phase.shrink])
    @given(programs)
    def run(program):
        shuffle = random.Random(next(counter) * 100 + bagua.rank())
        trouble = ""
        try:
            for batch in program:
                rank.run(batch, shuffle)
        except Exception as error:
            trouble = f"rank {bagua.rank()}: {error}"
        # All ranks learn of it, and so go on drawing the same examples.
        troubles = [text for text in MPI.COMM_WORLD.allgather(trouble) if text]
        assert not troubles, "\n".join(troubles)

    run()


@pytest.mark.ranks(2, 3)
def test_ranks_draw_the_same_programs(bagua, ranks):
    drawn = []

    @settings(max_examples=20)
    @given(programs)
    def draw(program):
        drawn.append(repr(program))

    draw()
    assert len(drawn) == 20
    everyone = bagua.allgather_object(drawn)
    assert all(theirs == drawn for theirs in everyone)


@pytest.mark.ranks(3, 4)
def test_overlapping_sets_never_wait_in_a_circle(bagua, sets, ranks):
    """Each rank begins with another set, and waits for it before it turns to the next."""
    mine = [s for s in sets if s.included()]
    turn = bagua.rank() % len(mine)
    names = {s.process_set_id: f"set {s.process_set_id}" for s in sets}
    for _ in range(20):
        handles = []
        for process_set in mine[turn:] + mine[:turn]:
            one = np.ones(1000, np.float32)
            name = names[process_set.process_set_id]
            handles.append(
                (
                    process_set,
                    bagua.allreduce_async(one, name=name, op=bagua.Sum, process_set=process_set),
                )
            )
        for process_set, handle in handles:
            np.testing.assert_array_equal(bagua.synchronize(handle), process_set.size())
