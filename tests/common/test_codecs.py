"""Every codec with every instruction set: an oracle in NumPy, and the promises of the formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from common import formats
from common.formats import PATTERNS, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.testing import assert_array_equal

from bagua.common.core import core
from bagua.common.errors import UsageError

NAMES = core.build_info()["codecs"]
ISAS = core.isas()
GUARD = 64  # bytes before and behind what a codec may write
UNTOUCHED = 0xA5


class Choice(NamedTuple):
    """A codec and its settings; `block` is what a value's neighbours in the wire are."""

    name: str
    kept: int = 41
    values: str = "raw"

    @property
    def coding(self):
        return core.Coding(self.name, self.kept, self.values)

    @property
    def block(self) -> int:
        return self.coding.block

    def oracle_bytes(self, x):
        return formats.encode(self.name, x, self.kept, self.values)

    def oracle_values(self, wire, count):
        return formats.decode(self.name, wire, count, self.kept, self.values)


CHOICES = [
    *(Choice(name) for name in NAMES),
    Choice("topk", 1),
    Choice("topk", 4096),
    Choice("topk", 41, "fp16"),
    Choice("topk", 600, "minmax_u8"),  # more than one block of values in a chunk
    Choice("topk", 1000),
]
every_choice = pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(map(str, c)))
block_formats = pytest.mark.parametrize(
    "choice", [c for c in CHOICES if c.name in formats.BLOCKS], ids=lambda c: c.name
)


def guarded(nbytes: int, shift: int):
    """Memory full of a pattern, and those of its bytes that may change."""
    whole = np.full(GUARD + shift + nbytes + GUARD, UNTOUCHED, np.uint8)
    return whole, whole[GUARD + shift : GUARD + shift + nbytes]


def assert_guarded(whole, nbytes: int, shift: int):
    assert (whole[: GUARD + shift] == UNTOUCHED).all()
    assert (whole[GUARD + shift + nbytes :] == UNTOUCHED).all()


def encoded(choice: Choice, x, isa: str, shift: int = 0):
    _, source = guarded(x.nbytes, 4 * shift)
    source = source.view(np.float32)
    source[:] = x
    nbytes = choice.coding.wire_nbytes(len(x))
    whole, wire = guarded(nbytes, shift)
    choice.coding.encode(source, wire, isa)
    assert_guarded(whole, nbytes, shift)
    assert_array_equal(source.view(np.uint32), x.view(np.uint32))
    return wire


def decoded(choice: Choice, wire, count: int, isa: str, shift: int = 0):
    source = guarded(len(wire), shift)[1]
    source[:] = wire
    whole, values = guarded(4 * count, 4 * shift)
    choice.coding.decode(source, values.view(np.float32), isa)
    assert_guarded(whole, 4 * count, 4 * shift)
    return values.view(np.float32)


def assert_same_floats(actual, expected, told: str):
    """Equal bits; a NaN is a NaN, as no format says which."""
    nan = np.isnan(expected)
    assert_array_equal(np.isnan(actual), nan, told)
    assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan], told)


def check(choice: Choice, x, shift: int = 0):
    """Encodes and decodes as the oracle does; returns what was decoded."""
    wire = choice.oracle_bytes(x)
    values = choice.oracle_values(wire, len(x))
    for isa in ISAS:
        told = f"{choice} {isa} count {len(x)} shift {shift}"
        assert_array_equal(encoded(choice, x, isa, shift), wire, told)
        assert_same_floats(decoded(choice, wire, len(x), isa, shift), values, told)
    return values


def sizes(block: int):
    several = max(3 * block + block // 2 + 3, 1000)
    return sorted({0, 1, 2, 7, block - 1, block, block + 1, several})


def test_every_codec_has_an_oracle():
    assert formats.NAMES == NAMES
    assert {c.name for c in CHOICES} == set(NAMES)


@every_choice
@pytest.mark.parametrize("pattern", PATTERNS)
def test_same_bytes_everywhere(choice, pattern):
    for count in sizes(choice.block):
        check(choice, PATTERNS[pattern](count))


@every_choice
def test_memory_needs_no_alignment(choice):
    for count in sizes(choice.block):
        for shift in (1, 3, 7):
            check(choice, normal(count), shift)


@every_choice
@settings(max_examples=40)
@given(data=st.data())
def test_random_arrays(choice, data):
    elements = st.floats(width=32, allow_nan=False, allow_infinity=False)
    # `fill` makes most values equal: what is unusual about them stays in few places.
    shape = st.integers(0, min(choice.block, 512) + 70)
    check(choice, data.draw(arrays.arrays(np.float32, shape, elements=elements)))


@every_choice
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-140, 120), spread=st.integers(0, 30))
def test_random_magnitudes(choice, seed, exponent, spread):
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1, 2 * choice.block + 600))
    powers = exponent + generator.integers(-spread, spread + 1, count)
    check(choice, np.ldexp(normal(count, seed=seed), powers.clip(-149, 124)).astype(np.float32))


@every_choice
def test_garbage_decodes_without_harm(choice):
    generator = np.random.default_rng(0)
    for count in sizes(choice.block):
        for _ in range(5):
            wire = generator.integers(0, 256, choice.coding.wire_nbytes(count), np.uint8)
            expected = choice.oracle_values(wire, count)
            for isa in ISAS:
                assert_same_floats(decoded(choice, wire, count, isa), expected, isa)


def test_topk_places_outside_are_ignored():
    choice = Choice("topk", 4096)
    wire = choice.oracle_bytes(np.arange(1, 4, dtype=np.float32))
    wire = wire.copy()
    wire[:6].view(np.uint16)[:] = [3, 1, 65535]  # of three
    for isa in ISAS:
        assert decoded(choice, wire, 3, isa).tolist() == [0, 2, 0]


@block_formats
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_bad_value_makes_its_block_nan(choice, bad):
    block = choice.block
    x = normal(3 * block + 9)
    clean = check(choice, x)
    for place in (0, 1, 37, block - 1, block, 2 * block + 5, 3 * block, 3 * block + 8):
        x = normal(3 * block + 9)
        x[place] = bad
        values = check(choice, x)
        harmed = np.arange(len(x)) // block == place // block
        assert np.isnan(values[harmed]).all()
        assert_array_equal(values[~harmed], clean[~harmed])


@block_formats
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_but_bad_values(choice, bad):
    assert np.isnan(check(choice, np.full(choice.block + 3, bad, np.float32))).all()


@pytest.mark.parametrize("name", ["raw", "fp16", "bf16"])
def test_bad_values_stay_alone(name):
    x = normal(100)
    x[[3, 50, 99]] = [np.nan, np.inf, -np.inf]
    values = check(Choice(name), x)
    assert np.isnan(values[3])
    assert values[50] == -values[99] == np.inf
    assert np.isfinite(np.delete(values, [3, 50, 99])).all()


def test_topk_keeps_bad_values():
    x = normal(5000)
    x[[17, 4000, 4500]] = [np.inf, np.nan, -np.inf]
    values = check(Choice("topk", 2), x)
    assert np.flatnonzero(values).tolist() == [17, 4000, 4500]
    assert_array_equal(values[[17, 4000, 4500]], x[[17, 4000, 4500]])


def test_fp16_overflow_is_not_hidden():
    x = np.array([65504, 65519, 65520, -7e4, 3e38], np.float32)
    assert check(Choice("fp16"), x).tolist() == [65504, 65504, np.inf, -np.inf, np.inf]


# name: nbytes on the wire of 0, 1, 2, 7, 2047, 2048, 2049, 4096 and 4097 values
NBYTES = {
    "raw": (0, 4, 8, 28, 8188, 8192, 8196, 16384, 16388),
    "fp16": (0, 2, 4, 14, 4094, 4096, 4098, 8192, 8194),
    "bf16": (0, 2, 4, 14, 4094, 4096, 4098, 8192, 8194),
    "minmax_u8": (0, 9, 10, 15, 2079, 2080, 2089, 4160, 4169),
    "minmax_u4": (0, 9, 9, 12, 1152, 1152, 1161, 2304, 2313),
    "fp8_e4m3": (0, 5, 6, 11, 2063, 2064, 2069, 4128, 4133),
    "sign1": (0, 5, 5, 5, 260, 260, 265, 520, 525),
    "topk": (0, 6, 6, 6, 126, 126, 126, 246, 252),
}


@pytest.mark.parametrize("name", NAMES)
def test_nbytes(name):
    counts = (0, 1, 2, 7, 2047, 2048, 2049, 4096, 4097)
    assert tuple(core.Coding(name).wire_nbytes(n) for n in counts) == NBYTES[name]


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("fp16", 2), ("minmax_u8", 3.94), ("minmax_u4", 7.11), ("fp8_e4m3", 3.97), ("sign1", 31.51)],
)
def test_ratios(name, ratio):
    assert 4 * 2**20 / core.Coding(name).wire_nbytes(2**20) == pytest.approx(ratio, abs=0.005)


def minmax_bound(block, top):
    """Half a step; and where floats are coarse, some of their last places."""
    lo, hi = block.min().astype(float), block.max().astype(float)
    if hi - lo > np.finfo(np.float32).max:
        return np.inf  # by the format: x - lo overflows
    if (hi - lo) / top < 2.0**-127:
        return hi - lo  # 1 / step overflows
    return (hi - lo) / top / 2 * (1 + 1e-4) + 3.0 * np.spacing(np.abs(block).max())


def fp8_bound(block):
    """Half a last place: 2^-4 of a value, 2^-10 of the scale for those below its 2^-6."""
    scale = np.abs(block).max().astype(float) / 448
    if scale < 2.0**-127:
        return 448 * scale  # 1 / scale overflows
    return np.maximum(np.abs(block.astype(float)) * 2**-4, scale * 2**-10) * (1 + 1e-5) + 2e-45


def fp16_bound(block):
    error = np.maximum(np.abs(block.astype(float)) * 2**-11, 2**-25)
    return np.where(np.abs(block) < 65520, error, np.inf)


BOUNDS = {
    "raw": lambda x: 0,
    "fp16": fp16_bound,
    "bf16": lambda x: np.maximum(np.abs(x.astype(float)) * 2**-8, 2**-134),
    "minmax_u8": lambda x: minmax_bound(x, 255),
    "minmax_u4": lambda x: minmax_bound(x, 15),
    "fp8_e4m3": fp8_bound,
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_errors_are_bounded(name, pattern):
    choice = Choice(name)
    x = PATTERNS[pattern](3 * choice.block + choice.block // 2 + 100)
    wire = encoded(choice, x, ISAS[-1])
    values = decoded(choice, wire, len(x), ISAS[-1])
    for begin in range(0, len(x), choice.block):
        block = x[begin : begin + choice.block]
        with np.errstate(all="ignore"):
            error = np.abs(values[begin : begin + choice.block].astype(float) - block)
        assert (error <= BOUNDS[name](block)).all(), (begin, error.max())


@pytest.mark.parametrize("name", ["minmax_u8", "minmax_u4"])
@pytest.mark.parametrize("value", [0.0, 0.1, -7e-30, 1e-44, 3.4e38, -3.4e38])
def test_constants_are_exact(name, value):
    x = np.full(1000, value, np.float32)
    assert_array_equal(check(Choice(name), x), x)


def test_one_outlier_harms_its_block_only():
    x = PATTERNS["one outlier"](5 * 512)
    clean = x.copy()
    clean[1280] = 0
    error = np.abs(check(Choice("minmax_u8"), x) - x)
    far = np.arange(len(x)) // 512 != 1280 // 512
    assert error[far].max() < 0.02
    assert_array_equal(error[far], np.abs(check(Choice("minmax_u8"), clean) - clean)[far])


def test_signs_times_the_mean_magnitude():
    x = np.array([3, -1, 0, -0.0, -4, 1], np.float32)
    assert check(Choice("sign1"), x).tolist() == [1.5, -1.5, 1.5, 1.5, -1.5, 1.5]


def test_topk_keeps_the_first_of_equals():
    x = np.array([1, -5, 2, 5, -2, 2], np.float32)
    values = check(Choice("topk", 2048), x)
    assert values.tolist() == [0, -5, 2, 5, 0, 0]


def test_golden_vectors():
    """Should this fail, the format has changed: no two versions can talk to each other."""
    rows = json.loads(Path(__file__).with_name("golden_codecs.json").read_text())
    assert {row["codec"] for row in rows} == set(NAMES)
    assert rows == formats.golden()
    for row in rows:
        choice = Choice(row["codec"], row["kept"], row["values"])
        x = formats.golden_input(row["count"])
        for isa in ISAS:
            assert encoded(choice, x, isa).tobytes().hex() == row["wire"], (choice, isa)


def test_what_is_refused():
    x, wire = np.zeros(3, np.float32), np.zeros(12, np.uint8)
    for match, words in [
        ("there is no codec gzip.*; there are raw, fp16, ", ("gzip",)),
        ("there is no codec .*gzip", ("topk", 41, "gzip")),
        ("topk keeps 1 to 4096 values of 4096, not 0", ("topk", 0)),
        ("topk keeps 1 to 4096 values of 4096, not 4097", ("topk", 4097)),
        ("topk cannot code what topk keeps", ("topk", 41, "topk")),
        ("sign1 cannot code what topk keeps", ("topk", 41, "sign1")),
    ]:
        with pytest.raises(UsageError, match=match):
            core.Coding(*words)
    coding = core.Coding("raw")
    with pytest.raises(UsageError, match="instruction set mmx"):
        coding.encode(x, wire, "mmx")
    for values, to in [(x, wire[1:]), (x.astype(float), wire), (x, wire.view(np.int8))]:
        with pytest.raises(UsageError, match="a codec needs"):
            coding.encode(values, to)
        with pytest.raises(UsageError, match="a codec needs"):
            coding.decode(to, values)
