"""What happens to one bucket in one step, as data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from bagua.algorithms.other_names import instead_of_codec
from bagua.common.config import check_one_of, nearest
from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp

# The engine's wire formats; those that lose what rounding to a shorter float does not; those that
# learn only if what they lose is added to the next step's values.
_TABLE = core.codecs()
CODECS = tuple(name for name, _, _ in _TABLE)
LOSSY = tuple(name for name, lossy, _ in _TABLE if lossy)
NEED_FEEDBACK = tuple(name for name, _, needs_feedback in _TABLE if needs_feedback)
# What can code the values that topk keeps.
VALUE_CODECS = ("raw", "fp16", "minmax_u8")
CHUNK = 4096  # values of which topk keeps some
PEERS = ("all", "shift_one", "random", "ring", "exponential")
# What can travel, and when each of it can.
TIMES = {
    "grad": ("backward",),
    "momentum": ("backward",),
    "weight": ("forward", "step", "background"),
    "delta": ("step", "forward"),
}
# And why at no other.
_WHY = {
    "grad": "the optimizer steps by the mean, so it must be there before",
    "momentum": "it takes the place of gradients, whose mean must be there before the step",
    "weight": "weights change when the optimizer steps",
    "delta": "what a round has changed is known after its last step, and all ranks have to apply "
    "it at the same one",
}


# What a field takes, by how its type is written.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "text"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "bool | None": (lambda value: value is None or isinstance(value, bool), "True, False or None"),
    "int": (lambda value: _is_number(value) and value == int(value), "a whole number"),
    "float": (lambda value: _is_number(value), "a finite number"),
    "ReduceOp": (
        lambda value: value in tuple(ReduceOp),
        "bagua.Average, Sum or another of them",
    ),
}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))


def check_kinds(choices: Any) -> None:
    """Refuses a dataclass in which a field has a value of another kind."""
    for field in fields(choices):
        takes, said = _KINDS.get(str(field.type), (lambda value: True, ""))
        value = getattr(choices, field.name)
        if not takes(value):
            raise UsageError(f"{field.name} is {said}, not {value!r}")


def as_written(choices: Any) -> str:
    """A dataclass as one would write it; the same in every process, also with a function in it."""

    def said(value: Any) -> str:
        kind: Any = type(value)
        if callable(value):
            return str(getattr(value, "__qualname__", kind.__qualname__))
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(map(said, value)))}}}"
        # Not where it lies.
        return f"{kind.__qualname__}()" if kind.__repr__ is object.__repr__ else repr(value)

    chosen = [
        f"{f.name}={said(value)}"
        for f in fields(choices)
        if (value := getattr(choices, f.name)) != f.default
    ]
    return f"{type(choices).__name__}({', '.join(chosen)})"


@dataclass(frozen=True)
class Exchange:
    """What happens to one bucket in one step."""

    what: str = "grad"  # what travels
    codec: str = "raw"  # the wire format
    peers: str = "all"  # with whom
    seed: int = 0  # of random peers; the same on all ranks
    when: str = "backward"  # during backward; the result is there when backward returns
    every: int = 1  # steps
    op: ReduceOp = ReduceOp.Average
    hierarchical: bool = False  # exact between ranks that share a machine
    error_feedback: bool | None = None  # None: where the codec needs it
    density: float = 0.01  # topk: the share of values that travel
    values: str = "raw"  # topk: their codec
    low_rank: int = 0  # of matrices that travel as products; 0: as they are
    momentum_correction: float = 0.0  # of the last gradients that travel with the new ones
    outer_lr: float = 1.0  # delta: the step that all take together
    outer_momentum: float = 0.0
    sync_interval_ms: float = 0.0  # background: the pause between two exchanges

    __repr__ = as_written

    def __post_init__(self) -> None:
        check_kinds(self)
        if instead := instead_of_codec(self.codec):
            raise UsageError(f"codec={self.codec!r} is no codec; give {instead} in place of one")
        for field, known in (
            ("what", tuple(TIMES)),
            ("codec", CODECS),
            ("peers", PEERS),
            ("values", VALUE_CODECS),
        ):
            check_one_of(field, getattr(self, field), known)
        if self.when not in TIMES[self.what]:
            times = TIMES[self.what]
            is_one = any(self.when in others for others in TIMES.values())
            raise UsageError(
                f"{self.what} travels at when={' or '.join(map(repr, times))}, not {self.when!r}"
                f"{f': {_WHY[self.what]}' if is_one else nearest(self.when, times)}"
            )
        self._check_numbers()
        self._check_peers()
        if self.codec == "raw":
            if self.error_feedback:
                raise UsageError("error_feedback needs a codec that loses something, not raw")
            if self.op == ReduceOp.Adasum and self.hierarchical:
                raise UsageError("Adasum weighs what every rank gives; it has no hierarchical form")
            return
        if self.op not in (ReduceOp.Average, ReduceOp.Sum):
            raise UsageError(f"a codec carries sums and averages, not {ReduceOp(self.op).name}")
        if self.codec in NEED_FEEDBACK and self.error_feedback is False:
            raise UsageError(
                f"{self.codec} does not learn without error feedback; leave error_feedback out"
            )

    def _check_numbers(self) -> None:
        if not 1 / CHUNK <= self.density <= 1:
            raise UsageError(
                f"density is a share from 1/{CHUNK}, which is one of every {CHUNK} values, to 1, "
                f"not {self.density}"
            )
        if self.every < 1 or self.every != int(self.every):
            raise UsageError(f"every is a number of steps, at least 1, not {self.every}")
        if self.every > 1 and self.when == "backward":
            raise UsageError(
                f"every={self.every} would lose the gradients of steps in between; use "
                "what='delta' or 'weight', or backward_passes_per_step"
            )
        if self.low_rank and (self.what != "grad" or self.op != ReduceOp.Average):
            raise UsageError("low_rank is for averages of gradients")
        if self.low_rank and self.codec != "raw":
            raise UsageError(f"low_rank and codec={self.codec!r} both shrink gradients; choose one")
        if self.low_rank and self.error_feedback is False:
            raise UsageError("low_rank does not learn without error feedback; leave it out")
        if self.low_rank < 0 or self.low_rank != int(self.low_rank):
            raise UsageError(f"a rank of matrices is a whole number from 1 on, not {self.low_rank}")
        if not 0 <= self.momentum_correction < 1:
            raise UsageError(
                f"momentum_correction is from 0 to below 1, not {self.momentum_correction}"
            )
        if self.momentum_correction and (
            self.what != "grad" or self.op != ReduceOp.Average or self.low_rank
        ):
            raise UsageError("momentum_correction is for averages of gradients, without low_rank")
        if self.what != "delta" and (self.outer_lr != 1 or self.outer_momentum):
            raise UsageError(
                f"outer_lr={self.outer_lr} and outer_momentum={self.outer_momentum} are for steps "
                f"by what='delta', and would do nothing with {self.what!r}; use 1.0 and 0.0 there"
            )
        if self.when != "background" and self.sync_interval_ms:
            raise UsageError(
                f"sync_interval_ms={self.sync_interval_ms} is for when='background', and would do "
                f"nothing with {self.when!r}, which counts steps: use every=, and 0 for this"
            )
        if not self.outer_lr > 0:
            raise UsageError(f"outer_lr is above 0, not {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise UsageError(f"outer_momentum is from 0 to below 1, not {self.outer_momentum}")
        if not self.sync_interval_ms >= 0:
            raise UsageError(f"sync_interval_ms is at least 0, not {self.sync_interval_ms}")

    def _check_peers(self) -> None:
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is a whole number from 0 to below 2**63, not {self.seed!r}")
        if self.seed and self.peers != "random":
            raise UsageError(f"seed is for peers='random', not {self.peers!r}")
        if self.what != "grad" and self.op != ReduceOp.Average:
            raise UsageError(f"{self.what} is averaged, not {ReduceOp(self.op).name}")
        if self.peers != "all" and self.what != "weight":
            raise UsageError(
                f"{self.what} of some peers would let replicas drift apart for ever; with "
                f"peers={self.peers!r} use what='weight'"
            )
        if self.what != "weight" or self.codec == "raw":
            return
        if self.peers != "ring":
            raise UsageError(
                f"weights lose too much in {self.codec}. What a codec can carry are their changes: "
                "to both neighbors with peers='ring', when='step', or to all with what='delta'"
            )
        if self.codec in NEED_FEEDBACK or self.error_feedback:
            without = "Use minmax_u8, minmax_u4, fp8_e4m3, fp16 or bf16"
            raise UsageError(
                f"a ring sets weights to what its codec has said of them; {self.codec} with error "
                "feedback says too little. "
                f"{without if self.codec in NEED_FEEDBACK else 'Leave error_feedback out'}"
            )
        if self.when != "step":
            raise UsageError(
                f"through {self.codec} a ring carries how weights have moved in a step, at "
                f"when='step', not {self.when!r}"
            )

    @property
    def mirrors(self) -> bool:
        """Whether each rank keeps copies of its neighbors' weights, and is told their changes."""
        return self.what == "weight" and self.codec != "raw"

    @property
    def feeds_back(self) -> bool:
        """Whether what encoding loses is kept for the next time."""
        chosen = self.error_feedback
        return self.codec in NEED_FEEDBACK if chosen is None else chosen

    @property
    def kept(self) -> int:
        """How many floats the engine keeps of each value until the next time."""
        if self.mirrors:
            return 3
        # What encoding has lost of this rank's values, and of the mean where that is encoded, too.
        return (1 if self.codec == "topk" else 2) if self.feeds_back else 0

    @property
    def wire(self) -> str:
        """The codec as the engine wants to hear of it; empty for memory as it is."""
        if self.codec == "topk":
            return f"topk:{max(1, round(self.density * CHUNK))}:{self.values}"
        return "" if self.codec == "raw" else self.codec
