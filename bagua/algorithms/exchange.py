"""What happens to one bucket in one step, as data."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.common.config import nearest
from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp

# The engine's wire formats; what they lose that rounding to a shorter float does not.
CODECS = ("raw", "fp16", "bf16", "minmax_u8", "minmax_u4", "fp8_e4m3", "sign1", "topk")
LOSSY = ("minmax_u8", "minmax_u4", "fp8_e4m3", "sign1", "topk")
# Those that learn only if what they lose is added to the next step's values.
NEED_FEEDBACK = ("sign1", "topk")
# What can code the values that topk keeps.
VALUE_CODECS = ("raw", "fp16", "minmax_u8")
CHUNK = 4096  # values of which topk keeps some


@dataclass(frozen=True)
class Exchange:
    """What happens to one bucket in one step."""

    what: str = "grad"  # what travels
    collective: str = "auto"  # a row of the engine's table, or "auto"
    codec: str = "raw"  # the wire format
    when: str = "backward"  # during backward; the result is there when backward returns
    op: ReduceOp = ReduceOp.Average
    hierarchical: bool = False  # exact between ranks that share a machine
    error_feedback: bool | None = None  # None: where the codec needs it
    density: float = 0.01  # topk: the share of values that travel
    values: str = "raw"  # topk: their codec

    def __post_init__(self) -> None:
        for field, known in (
            ("what", ("grad",)),
            ("collective", ("auto",)),
            ("codec", CODECS),
            ("when", ("backward",)),
            ("values", VALUE_CODECS),
        ):
            value = getattr(self, field)
            if value not in known:
                raise UsageError(
                    f"exchange {field}={value!r} is not in this version; known: "
                    f"{', '.join(known)}{nearest(str(value), known)}"
                )
        if not 0 < self.density <= 1:
            raise UsageError(f"density is a share above 0, at most 1, not {self.density}")
        if self.codec == "raw":
            if self.error_feedback:
                raise UsageError("error_feedback needs a codec that loses something, not raw")
            return
        if self.op not in (ReduceOp.Average, ReduceOp.Sum):
            raise UsageError(f"a codec carries sums and averages, not {ReduceOp(self.op).name}")
        if self.codec in NEED_FEEDBACK and self.error_feedback is False:
            raise UsageError(
                f"{self.codec} does not learn without error feedback; leave error_feedback out"
            )

    @property
    def feeds_back(self) -> bool:
        """Whether what encoding loses is kept for the next time."""
        chosen = self.error_feedback
        return self.codec in NEED_FEEDBACK if chosen is None else chosen

    @property
    def wire(self) -> str:
        """The codec as the engine wants to hear of it; empty for memory as it is."""
        if self.codec == "topk":
            return f"topk:{max(1, round(self.density * CHUNK))}:{self.values}"
        return "" if self.codec == "raw" else self.codec
