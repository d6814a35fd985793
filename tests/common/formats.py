"""What every codec must put on the wire, in NumPy: an oracle that knows the formats, not the code.

All arithmetic is float32, one rounding per operation. After a wanted change of a format write the
golden vectors again:

    python tests/common/formats.py > tests/common/golden_codecs.json
"""

from __future__ import annotations

import functools
import json
from typing import Any, Callable, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
F = np.float32
NAN = np.array(0x7FC00000, np.uint32).view(F)[()]
CHUNK = 4096  # of topk
ROW = 128  # what is gathered side by side, of blocks


def gathered(x: Floats, begin: Floats, merge: Callable[[Floats, Floats], Floats]) -> Any:
    """Place p takes in x[p], x[p + ROW], ...; then place p takes in place p + 64, p + 32, ..."""
    places = functools.reduce(merge, x.reshape(-1, ROW), begin)
    while len(places) > 1:
        half = len(places) // 2
        places = merge(places[:half], places[half:])
    return places[0]


def filled(x: Floats, size: int, value: float) -> Floats:
    """A block that is short of values, filled up."""
    return np.concatenate([x, np.full(size - len(x), value, F)])


def inverse(step: Any) -> Any:
    one_over = F(1) / step
    return one_over if np.isfinite(one_over) else F(0)


# A block's values to its head and codes, and back.


def minmax_codes(x: Floats, block: int, bits: int) -> tuple[list[Any], NDArray[Any]]:
    top = F(2**bits - 1)
    if not np.isfinite(x).all():
        return [NAN, F(0)], np.full(len(x), top)
    whole = filled(x, block, x[0])
    # Of equal values the older one stays: it matters for 0.0 and -0.0.
    # Adding 0 makes every zero a positive one.
    lo = gathered(whole, whole[:ROW], lambda old, new: np.where(new < old, new, old)) + F(0)
    hi = gathered(whole, whole[:ROW], lambda old, new: np.where(new > old, new, old)) + F(0)
    step = hi / top - lo / top
    place = (x - lo) * inverse(step)
    return [lo, step], np.rint(np.where(place < top, place, top))


def minmax_values(head: Floats, codes: NDArray[Any]) -> Floats:
    lo, step = head
    return lo + codes.astype(F) * step


def fp8_table() -> NDArray[np.float64]:
    """The values of codes 0 to 255; that of 127 is only ever read, as 448 is the greatest."""
    exponents, fractions = np.divmod(np.arange(128), 8)
    subnormal = np.ldexp(fractions / 8, -6)
    normal = np.ldexp(1 + fractions / 8, exponents - 7)
    magnitudes = np.where(exponents == 0, subnormal, normal)
    return np.concatenate([magnitudes, -magnitudes])


def fp8_codes(x: Floats) -> tuple[list[Any], NDArray[Any]]:
    bad = not np.isfinite(x).all()
    scale = NAN if bad else np.abs(x).max() / F(448)
    y = x * inverse(scale)
    magnitude = np.where(np.abs(y) < 448, np.abs(y), 448).astype(np.float64)
    table = fp8_table()[:127]
    ties = (table[:-1] + table[1:]) / 2
    code = np.searchsorted(ties, magnitude)  # a tie goes to the smaller one
    to_odd = np.isin(magnitude, ties) & (code % 2 == 1)
    return [scale], code + to_odd + 128 * (np.signbit(x) & (not bad))


def fp8_values(head: Floats, codes: NDArray[Any]) -> Floats:
    return fp8_table().astype(F)[codes] * head[0]


def sign1_codes(x: Floats, block: int) -> tuple[list[Any], NDArray[Any]]:
    parts = np.abs(filled(x, block, 0)) * F(1 / 2048)
    mean = gathered(parts, np.zeros(ROW, F), np.add) * (F(2048) / F(len(x)))
    most = np.finfo(F).max  # a mean of numbers is one, rounded up or not
    return [min(mean, most) if np.isfinite(x).all() else NAN], x < 0


def sign1_values(head: Floats, codes: NDArray[Any]) -> Floats:
    return np.where(codes, -head[0], head[0])


class Blocks(NamedTuple):
    """Formats of a head of floats and one code per value, in blocks."""

    block: int
    bits: int
    head_count: int
    codes: Callable[[Floats], tuple[list[Any], NDArray[Any]]]
    values: Callable[[Floats, NDArray[Any]], Floats]

    def encode(self, x: Floats) -> bytes:
        wire = b""
        for begin in range(0, len(x), self.block):
            head, codes = self.codes(x[begin : begin + self.block])
            # The lowest bit first, whether it is of a code or of a byte.
            bits = codes.astype(np.uint8)[:, None] >> np.arange(self.bits) & 1
            wire += np.array(head, F).tobytes() + np.packbits(bits, bitorder="little").tobytes()
        return wire

    def decode(self, wire: Bytes, count: int) -> Floats:
        x = np.empty(count, F)
        for begin in range(0, count, self.block):
            n = min(self.block, count - begin)
            head, wire = np.split(wire, [4 * self.head_count])
            codes, wire = np.split(wire, [-(-n * self.bits // 8)])
            bits = np.unpackbits(codes, bitorder="little")[: n * self.bits].reshape(n, -1)
            codes = (bits.astype(int) << np.arange(self.bits)).sum(1)
            x[begin : begin + n] = self.values(head.view(F), codes)
        return x


BLOCKS = {
    "minmax_u8": Blocks(512, 8, 2, lambda x: minmax_codes(x, 512, 8), minmax_values),
    "minmax_u4": Blocks(128, 4, 2, lambda x: minmax_codes(x, 128, 4), minmax_values),
    "fp8_e4m3": Blocks(512, 8, 1, fp8_codes, fp8_values),
    "sign1": Blocks(2048, 1, 1, lambda x: sign1_codes(x, 2048), sign1_values),
}


def to_bf16(x: Floats) -> NDArray[np.uint16]:
    """The nearer of the two around x, else the even one; past the last one stands 2^128."""
    bits = x.view(np.uint32)
    below = bits >> 16

    def magnitude(code: NDArray[Any]) -> NDArray[np.float64]:
        wide = (code << 16 & 0x7FFFFFFF).view(F).astype(np.float64)
        return np.where(np.isinf(wide), 2.0**128, wide)

    to_below = np.abs(x.astype(np.float64)) - magnitude(below)
    to_above = magnitude(below + 1) - np.abs(x.astype(np.float64))
    up = (to_above < to_below) | ((to_above == to_below) & (below % 2 == 1))
    quiet = below | 0x40
    return np.where(np.isnan(x), quiet, np.where(np.isinf(x), below, below + up)).astype(np.uint16)


def encode_topk(x: Floats, kept: int, values: str) -> bytes:
    wire = b""
    for begin in range(0, len(x), CHUNK):
        chunk = x[begin : begin + CHUNK]
        magnitudes = (chunk.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
        magnitudes[np.isnan(chunk)] = 0x7F800001  # on top, and all equal
        order = np.argsort(-magnitudes, kind="stable")
        places = np.sort(order[: -(-len(chunk) * kept // CHUNK)])
        wire += places.astype(np.uint16).tobytes() + encode(values, chunk[places]).tobytes()
    return wire


def decode_topk(wire: Bytes, count: int, kept: int, values: str) -> Floats:
    x = np.zeros(count, F)
    for begin in range(0, count, CHUNK):
        chunk = x[begin : begin + CHUNK]
        n = -(-len(chunk) * kept // CHUNK)
        places, wire = np.split(wire, [2 * n])
        said, wire = np.split(wire, [len(encode(values, np.zeros(n, F)))])
        inside = places.view(np.uint16) < len(chunk)
        chunk[places.view(np.uint16)[inside]] = decode(values, said, n)[inside]
    return x


PLAIN: dict[str, tuple[Callable[[Floats], NDArray[Any]], Callable[[Bytes], NDArray[Any]]]] = {
    "raw": (lambda x: x, lambda wire: wire.view(F)),
    "fp16": (lambda x: x.astype(np.float16), lambda wire: wire.view(np.float16)),
    "bf16": (to_bf16, lambda wire: (wire.view(np.uint16).astype(np.uint32) << 16).view(F)),
}
NAMES = [*PLAIN, *BLOCKS, "topk"]


def encode(name: str, x: Floats, kept: int = 41, values: str = "raw") -> Bytes:
    with np.errstate(all="ignore"):
        if name in PLAIN:
            wire = PLAIN[name][0](x).tobytes()
        elif name in BLOCKS:
            wire = BLOCKS[name].encode(x)
        else:
            wire = encode_topk(x, kept, values)
    return np.frombuffer(wire, np.uint8)


def decode(name: str, wire: Bytes, count: int, kept: int = 41, values: str = "raw") -> Floats:
    wire = wire.copy()  # aligned, so that it can be seen as floats
    with np.errstate(all="ignore"):
        if name in PLAIN:
            return PLAIN[name][1](wire).astype(F)
        if name in BLOCKS:
            return BLOCKS[name].decode(wire, count)
        return decode_topk(wire, count, kept, values)


def golden_input(count: int) -> Floats:
    """Of magnitudes 2^-18 to 8 and both signs; made of whole numbers, so the same everywhere."""
    mixed = np.arange(count, dtype=np.uint64) * 2654435761 % 2**32
    whole = (mixed >> 8).astype(np.int64) - 2**23
    return np.ldexp(whole.astype(F), -20 - np.arange(count) % 7).astype(F)


def normal(count: int, mean: float = 0, deviation: float = 1, seed: int = 0):
    return np.random.default_rng(seed).normal(mean, deviation, count).astype(np.float32)


def mixed_zeros(count: int):
    return np.where(normal(count) < 0, np.float32(0.0), np.float32(-0.0))


def extremes(count: int):
    return np.where(normal(count) < 0, np.float32(3e38), np.float32(-3e38))


def outlier(count: int):
    x = normal(count)
    x[count // 2 : count // 2 + 1] = 1000
    return x


def ties(count: int):
    return np.random.default_rng(0).integers(-3, 4, count).astype(np.float32)


def half_codes(count: int):
    """Values in the middle between two codes where a block's scale is 1."""
    x = np.arange(count) % 510 / np.float32(2)
    x[::64] = 448  # of fp8
    return x.astype(np.float32)


def between_halves(count: int):
    """In the middle between two bf16, and between two fp16, in turn."""
    i = np.arange(count, dtype=np.uint32)
    return np.where(i % 2, 0x38000000 + (i << 12), 0x38008000 + (i << 15)).astype(np.uint32).view(F)


PATTERNS = {
    "between halves": between_halves,
    "normal": normal,
    "constant": lambda n: np.full(n, 0.1, np.float32),
    "negative constant": lambda n: np.full(n, -7e-30, np.float32),
    "zeros": lambda n: np.zeros(n, np.float32),
    "negative zeros": lambda n: np.full(n, -0.0, np.float32),
    "mixed zeros": mixed_zeros,
    "denormals": lambda n: normal(n, 0, 1e-40),
    "hardly normal": lambda n: normal(n, 0, 1e-36),
    "huge mean": lambda n: normal(n, 1e6, 1e-1),
    "huge mean, no room": lambda n: normal(n, -16777216, 1),
    "extremes": extremes,
    "large": lambda n: normal(n, 0, 3e37),
    "fp16 overflows": lambda n: normal(n, 0, 65520),
    "one outlier": outlier,
    "ties": ties,
    "half codes": half_codes,
    "many magnitudes": golden_input,
}


def golden() -> list[dict[str, Any]]:
    """Codec, count of `golden_input`, wire: a whole block and some more, where blocks are short."""
    counts = {"raw": 9, "fp16": 9, "bf16": 9, "minmax_u8": 515, "minmax_u4": 131}
    counts |= {"fp8_e4m3": 515, "sign1": 2053, "topk": 4196}
    rows = [(name, 41, "raw") for name in NAMES] + [("topk", 8, "fp16"), ("topk", 8, "minmax_u8")]
    return [
        {
            "codec": name,
            "kept": kept,
            "values": values,
            "count": counts[name],
            "wire": encode(name, golden_input(counts[name]), kept, values).tobytes().hex(),
        }
        for name, kept, values in rows
    ]


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
