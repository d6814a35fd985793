"""How the operations see arrays: the protocol, and NumPy with anything that speaks DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.kinds import DTYPE_NUMBER, DTYPES


class Arrays(Protocol):
    """What the operations need to know of one kind of array."""

    def contiguous(self, array: Any) -> Any:
        """The array itself if its elements are in C order without gaps, else a copy that is."""

    def describe(self, array: Any) -> tuple[int, int, Sequence[int]]:
        """Address, number of the element type, and shape of a contiguous array."""

    def device(self, array: Any) -> int:
        """The number of the device whose memory it is in, or -1 for the host's."""

    def empty(self, shape: Sequence[int], like: Any) -> Any:
        """A new contiguous array of the same element type and device."""

    def adopt(self, memory: Any, shape: Sequence[int], like: Any) -> Any:
        """An array over memory that the engine allocated."""

    def assign(self, target: Any, source: Any) -> None:
        """Copies values into an array that may have gaps."""

    def note_written(self, target: Any) -> None:
        """An operation has written to its memory."""

    def check_writable(self, target: Any) -> None:
        """Raises if an in-place operation cannot write here."""

    def finish(self, result: Any, like: Any) -> Any:
        """The result in the form the caller's input had."""

    def like_splits(self, rows: list[int], splits: Any) -> Any:
        """Row counts received by an alltoall in the form the caller gave the splits in."""


# Byte-swapped types are equal to none of these. NumPy knows bfloat16 once ml_dtypes is imported.
_NUMBER = {np.dtype(name): DTYPE_NUMBER[name] for name in DTYPES if name != "bfloat16"}


class NumpyArrays:
    """NumPy arrays; other DLPack exporters are viewed as NumPy without a copy."""

    def contiguous(self, array: Any) -> Any:
        view = self._view(array)
        return view if view.flags.c_contiguous else np.ascontiguousarray(view)

    def describe(self, array: Any) -> tuple[int, int, Sequence[int]]:
        number = _NUMBER.get(array.dtype)
        if number is None:
            raise UsageError(
                f"dtype {array.dtype} cannot be exchanged; supported are {', '.join(DTYPES)}"
            )
        return core.address(array), number, array.shape

    def device(self, array: Any) -> int:
        return -1

    def empty(self, shape: Sequence[int], like: Any) -> Any:
        return np.empty(shape, self._view(like).dtype)

    def adopt(self, memory: Any, shape: Sequence[int], like: Any) -> Any:
        dtype = self._view(like).dtype
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.frombuffer(memory, dtype).reshape(shape)

    def assign(self, target: Any, source: Any) -> None:
        self._view(target)[...] = source

    def note_written(self, target: Any) -> None:
        pass

    def check_writable(self, target: Any) -> None:
        if not isinstance(target, np.ndarray) and not hasattr(target, "__dlpack__"):
            raise UsageError(f"an in-place operation needs an array, not {type(target).__name__}")
        if not self._view(target).flags.writeable:
            raise UsageError("an in-place operation needs a writable array")

    def finish(self, result: Any, like: Any) -> Any:
        if isinstance(like, np.ndarray) or not hasattr(like, "__dlpack__"):
            return result
        if hasattr(like, "__array_namespace__"):
            return like.__array_namespace__().from_dlpack(result)
        return result

    def like_splits(self, rows: list[int], splits: Any) -> Any:
        return np.array(rows, splits.dtype) if isinstance(splits, np.ndarray) else rows

    @staticmethod
    def _view(array: Any) -> Any:
        if isinstance(array, np.ndarray):
            return array
        if hasattr(array, "__dlpack__"):
            return np.from_dlpack(array)
        return np.asarray(array)
