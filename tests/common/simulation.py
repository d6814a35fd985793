"""All ranks in one process: what a codec keeps of their values, and the mean they all arrive at."""

from __future__ import annotations

import numpy as np

from bagua.algorithms import Exchange
from bagua.common.core import core


def coding_of(exchange: Exchange):
    """The engine's codec."""
    name, kept, values = [*exchange.wire.split(":"), "41", "raw"][:3]
    return core.Coding(name, int(kept), values)


def travel(coding, values: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
    """What arrives of values; with a residual, of both, and the residual becomes what does not."""
    whole = values if residual is None else values + residual
    whole = np.ascontiguousarray(whole, np.float32)
    wire, said = np.empty(coding.wire_nbytes(whole.size), np.uint8), np.empty_like(whole)
    coding.encode(whole, wire)
    coding.decode(wire, said)
    if residual is not None:
        residual[:] = whole - said
    return said


class Simulation:
    """All ranks: each slice goes to its owner, who encodes the mean; or all values to all."""

    def __init__(self, exchange: Exchange, n: int, count: int) -> None:
        self.coding = coding_of(exchange)
        self.n = n
        self.sparse = exchange.codec == "topk"
        blocks = -(-count // self.coding.block)
        owned = [len(part) for part in np.array_split(np.arange(blocks), n)]
        self.ends = np.minimum(np.cumsum(owned) * self.coding.block, count)
        # Each rank's, and those of the means.
        self.residuals = [None] * (n + 1)
        if exchange.codec in ("sign1", "topk") or exchange.error_feedback:
            self.residuals = np.zeros((n + 1, count), np.float32)

    def mean(self, values: np.ndarray, ranks: int = 0) -> np.ndarray:
        """Of one row per rank; or of so many ranks, where a row is the sum of a host's."""
        divisor = np.float32(ranks or self.n)
        if self.n == 1:
            return values[0]
        if self.sparse:
            said = [travel(self.coding, values[r], self.residuals[r]) for r in range(self.n)]
            return sum(said, np.zeros_like(values[0])) / divisor
        result, begin = np.empty_like(values[0]), 0
        for end in self.ends:
            place = slice(begin, end)
            lost = [r if r is None else r[place] for r in self.residuals]
            total = np.zeros(end - begin, np.float32)
            for rank in range(self.n):
                total += travel(self.coding, values[rank][place], lost[rank])
            result[place] = travel(self.coding, total / divisor, lost[self.n])
            begin = end
        return result
