"""Compression of tensors that are exchanged: casts, codecs, and whatever a user subclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from bagua.algorithms.exchange import CODECS, Exchange
from bagua.common.config import nearest
from bagua.common.errors import UsageError


class Compressor:
    """Base of compressors; subclass it and pass the class, or an instance, as `compression`.

    What `compress` returns is exchanged as it is, so it must be a tensor whose sum over ranks
    makes sense.
    """

    wire_dtype: ClassVar[torch.dtype | None] = None
    # False for those below, which a bucket carries out by itself: a cast, or a codec.
    custom: ClassVar[bool] = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.custom = cls.__dict__.get("custom", True)  # also below FP16Compressor

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to exchange, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The exchanged tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    custom = False

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Casts floating-point tensors; others pass through."""

    custom = False

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not tensor.is_floating_point():
            return tensor, tensor.dtype
        return tensor.to(cls.wire_dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Two bytes per value, 11 bits of it precision; beyond 65504 it overflows to infinity."""

    custom = False
    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Two bytes per value, 8 bits of it precision, with the range of float32."""

    custom = False
    wire_dtype = torch.bfloat16


class CodecCompressor(Compressor):
    """A wire format of the engine, which encodes and decodes while it reduces.

    In a `DistributedOptimizer` it is that of the algorithm, with error feedback where it needs it.
    """

    custom = False

    def __init__(self, codec: str) -> None:
        self.codec = codec

    @property
    def wire(self) -> str:
        """As the engine wants to hear of it."""
        return Exchange(codec=self.codec).wire

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        if not tensor.is_floating_point():
            raise UsageError(f"{self!r} is for floats, not {str(tensor.dtype).split('.')[-1]}")
        return tensor.float() if tensor.dtype == torch.float64 else tensor, tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # type: ignore[override]
        return tensor.to(ctx)

    def __repr__(self) -> str:
        return f"Compression.{self.codec}"


class _Choices(type):
    def __getattr__(cls, name: str) -> Any:
        """Only for what is missing."""
        if name == "raw":
            return NoneCompressor
        if name in CODECS:
            return CodecCompressor(name)
        known = ["none", *CODECS[1:]]
        hint = nearest(name, known)
        raise AttributeError(f"there is no Compression.{name}; there are {', '.join(known)}{hint}")

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *CODECS]


class Compression(metaclass=_Choices):
    """The compressors to choose from: none, and every codec by its name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def checked(compression: Any, needs: Sequence[str] = ("compress", "decompress")) -> Any:
    """It, if it is a compressor."""
    if all(hasattr(compression, name) for name in needs):
        return compression
    names, remedy, hint = ("none", *CODECS), "Compression.none, fp16 or another of them", ""
    if isinstance(compression, str) and compression in names:
        remedy = f"Compression.{compression}"
    elif isinstance(compression, str):
        hint = nearest(compression, names)
    raise UsageError(
        f"compression={compression!r} is no compressor; give {remedy}, or a subclass of "
        f"Compressor{hint}"
    )
