"""Adam whose momentum travels as one byte a value, once its variance is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.algorithm import Algorithm, register
from bagua.common.errors import UsageError


@register
@dataclass(frozen=True)
class QAdam(Algorithm):
    """For `bagua.torch.QAdam`: after the warm-up m <- mean of b1 m + (1 - b1) g. Bytes: 2.03.

    What a codec sees is m over the root of the frozen variance, which is the same on all ranks.
    """

    what: str = "momentum"
    codec: str = "minmax_u8"
    hierarchical: bool = True
    error_feedback: bool | None = True
    warmup_steps: int = 100
    name: ClassVar[str] = "qadam"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.what != "momentum":
            raise UsageError(f"qadam is what='momentum'; for {self.what!r} give another algorithm")
