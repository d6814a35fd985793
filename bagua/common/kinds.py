"""Numbers the engine knows things by; they mirror csrc/common/types.h and csrc/engine/engine.h."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """Kinds of operation."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    JOIN = 6
    ADD_PROCESS_SET = 7
    REMOVE_PROCESS_SET = 8


class ReduceOp(IntEnum):
    """How values of different ranks become one."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


class Urgency(IntEnum):
    """How soon the others should hear of a request."""

    NOW = 0
    SOON = 1
    WAITED = 2


# Element types in the engine's order; arrays.py and torch/arrays.py map their own types to these.
DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
DTYPE_NUMBER = {name: number for number, name in enumerate(DTYPES)}

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
