"""What codecs cost one thread, in one process: `python -m benchmarks codecs`.

64 MB of normally distributed float32, more than caches hold, are encoded and decoded. Each codec is
measured beside a memcpy of the same values into memory that has been written before, in the same
rounds, and its times are told as multiples of it.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bagua.common.core import core
from benchmarks.measure import Run, interleaved

COUNT = 16 << 20  # float32: 64 MB
KEPT = 41  # of 4096 values, by topk
# What encoding and decoding may each cost, in memcpys, on a processor with AVX-512.
ASKED = {
    "fp16": 1.2,
    "bf16": 1.2,
    "minmax_u8": 0.7,
    "minmax_u4": 1.2,
    "fp8_e4m3": 1.2,
    "sign1": 1.2,
    "topk": 4.0,
}
ALLOWANCE = {"avx512": 1.0, "avx2": 1.5}  # nothing is asked of other instruction sets


@dataclass
class Row:
    codec: str
    isa: str
    encode_s: float
    decode_s: float
    memcpy_s: float
    wire_ratio: float  # how much shorter the wire is than the values

    def asked(self) -> float | None:
        if self.codec in ASKED and self.isa in ALLOWANCE:
            return ASKED[self.codec] * ALLOWANCE[self.isa]
        return None

    def text(self) -> str:
        times = (self.encode_s, self.decode_s, self.memcpy_s)
        ratios = (self.encode_s / self.memcpy_s, self.decode_s / self.memcpy_s)
        asked, verdict = self.asked(), ""
        if asked is not None:
            verdict = f"{asked:.2f} x {'met' if max(ratios) <= asked else 'missed'}"
        return (
            f"{self.codec:<11}{self.isa:<7}"
            + "".join(f"{seconds * 1e3:>8.1f} ms" for seconds in times)
            + "".join(f"{ratio:>8.2f} x" for ratio in ratios)
            + f"  {verdict:<14}{self.wire_ratio:>7.2f} x"
        )


class Memory:
    """Values, room for a copy of them, and what sweeps them out of the caches."""

    def __init__(self) -> None:
        self.values = np.random.default_rng(0).standard_normal(COUNT, np.float32)
        self.room = np.ones(COUNT, np.float32)
        self._other = np.ones(COUNT, np.float32)

    def memcpy(self) -> None:
        ctypes.memmove(self.room.ctypes.data, self.values.ctypes.data, self.values.nbytes)

    def sweep(self) -> None:
        """Only reads: written lines would still have to go to memory while the next run counts."""
        self._other.max()


def measure(codec: str, isa: str, memory: Memory, quick: bool) -> Row:
    coding = core.Coding(codec, KEPT)
    wire = np.ones(coding.wire_nbytes(COUNT), np.uint8)
    runs: dict[str, Run] = {  # in this order: there is something to decode
        "memcpy": memory.memcpy,
        "encode": partial(coding.encode, memory.values, wire, isa),
        "decode": partial(coding.decode, wire, memory.room, isa),
    }
    figures = interleaved(runs, 1 if quick else 5, memory.sweep, turn=3)
    seconds = {f"{name}_s": figure["median_s"] for name, figure in figures.items()}
    return Row(codec, isa, **seconds, wire_ratio=memory.values.nbytes / wire.nbytes)


def run(quick: bool, every_isa: bool, output: Path) -> None:
    """Measures with the best instruction set or with every, prints the table, writes the JSON."""
    memory = Memory()
    isas = core.isas() if every_isa else core.isas()[-1:]
    codecs = core.build_info()["codecs"]
    rows = [measure(codec, isa, memory, quick) for codec in codecs for isa in isas]
    print(table(rows))
    output.parent.mkdir(parents=True, exist_ok=True)
    told = [{**asdict(row), "asked_memcpys": row.asked()} for row in rows]
    output.write_text(json.dumps(told, indent=1) + "\n")
    print(f"written: {output}\n")


def table(rows: list[Row]) -> str:
    names = [f"{name:>11}" for name in ("encode", "decode", "memcpy")]
    head = f"{'codec':<11}{'isa':<7}{''.join(names)}{'encode':>10}{'decode':>10}"
    about = "x: memcpys; asked: the most that each may cost; smaller: the wire than the values."
    return "\n".join(
        [f"{head}  {'asked':<14}{'smaller':>9}", *(row.text() for row in rows), "", about]
    )
