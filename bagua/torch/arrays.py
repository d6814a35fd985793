"""Torch tensors as the operations see them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from bagua.common.core import core
from bagua.common.errors import BaguaError, InternalError, UsageError
from bagua.common.kinds import DTYPE_NUMBER, DTYPES
from bagua.common.nccl import library_path
from bagua.common.warn import warn
from bagua.common.world import world

_DTYPE_NUMBER = {getattr(torch, name): number for number, name in enumerate(DTYPES)}


_host = -1  # or a pretended device


def device_of(tensor: torch.Tensor) -> int:
    """The number of its device; -1 is the host."""
    return _host if tensor.is_cpu else tensor.get_device()


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether the host would have to wait for its numbers."""
    return device_of(tensor) >= 0


def arena_of(
    like: torch.Tensor, dtype: torch.dtype, **about: Any
) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """A bucket of the engine on the tensor's device, what is in its arena, in a row, and what the
    engine keeps of each value until the next time.
    """
    on_device: list[torch.Tensor] = []
    registered = False

    def allocate(nbytes: int) -> tuple[int, torch.Tensor]:
        nonlocal registered
        kind = torch.float32 if on_device else dtype  # the arena is the first
        memory = None if on_device or about.get("codec") else _registrable(nbytes, like)
        if memory is None:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=like.device)
        else:
            registered = True
        on_device.append(memory.view(kind))
        return memory.data_ptr(), memory

    bucket = core.Bucket(
        engine=world().engine,
        dtype=DTYPE_NUMBER[dtype_name(dtype)],
        device=device_of(like),
        allocate=allocate,
        **about,
    )
    if registered:
        bucket.use_registered()
    if on_device:
        return bucket, on_device[0], on_device[1:]
    return bucket, tensor_over(bucket, dtype), [tensor_over(m, torch.float32) for m in bucket.kept]


def _registrable(nbytes: int, like: torch.Tensor) -> torch.Tensor | None:
    """Memory that NCCL can register, where that is wished."""
    config = world().config
    if nbytes == 0 or not (config.nccl and config.nccl_register):
        return None
    memory = core.nccl_memory(device_of(like), library_path(), nbytes)
    if memory is None:
        warn("nccl_register has no effect: there is no NCCL here that can, 2.19 or newer")
        return None
    return torch.as_tensor(memory, device=like.device).zero_()


def tensor_over(memory: Any, dtype: torch.dtype, begin: int = 0, count: int = -1) -> torch.Tensor:
    if count == 0 or memoryview(memory).nbytes == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, offset=begin * dtype.itemsize, count=count)


def is_at_rest(bucket: Any) -> bool:
    last = bucket.last_launch()
    return last is None or bool(last.poll())


def wait_for_last(bucket: Any) -> None:
    """Until the last exchange of an engine's bucket is over, well or not."""
    last = bucket.last_launch()
    if last is not None:
        with contextlib.suppress(BaguaError):
            last.wait()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


class TorchArrays:
    """Autograd never sees what happens here: memory is written behind its back."""

    def contiguous(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"a torch.Tensor is needed, not {type(tensor).__name__}")
        if not tensor.is_cpu and not tensor.is_cuda:
            raise UsageError(
                f"tensors on CPUs and NVIDIA's GPUs are exchanged, not one on {tensor.device}; "
                "move it with .cpu()"
            )
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"a dense tensor is needed, not one with layout {tensor.layout}; use to_dense() "
                "or, for sparse COO, sparse_allreduce_async()"
            )
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        # A lazy conjugate or negation is not in the memory yet.
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def describe(self, tensor: Any) -> tuple[int, int, Sequence[int]]:
        number = _DTYPE_NUMBER.get(tensor.dtype)
        if number is None:
            raise UsageError(
                f"{tensor.dtype} cannot be exchanged; supported are {', '.join(DTYPES)}"
            )
        return tensor.data_ptr(), number, tensor.shape

    def device(self, tensor: Any) -> int:
        return device_of(tensor)

    def empty(self, shape: Sequence[int], like: Any) -> Any:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)

    def adopt(self, memory: Any, shape: Sequence[int], like: Any) -> Any:
        if 0 in shape:
            return self.empty(shape, like)
        if memory.on_device != is_on_device(like):
            raise InternalError("a result is not where the tensor was that it is of")
        if not like.is_cpu:
            theirs = torch.as_tensor(memory, device=like.device).view(like.dtype)
            return theirs.view(tuple(shape)).clone()  # record_stream() knows of torch's own alone
        return torch.frombuffer(memory, dtype=like.dtype).view(tuple(shape))

    def assign(self, target: Any, source: Any) -> None:
        target.detach().copy_(source)

    def note_written(self, target: Any) -> None:
        core.note_written(target)

    def check_writable(self, target: Any) -> None:
        if not target.is_contiguous() and any(
            stride == 0 and extent > 1 for stride, extent in zip(target.stride(), target.shape)
        ):
            raise UsageError(
                "an in-place operation cannot write to an expanded tensor, whose elements share "
                "memory; use .clone() or the operation without the underscore"
            )

    def finish(self, result: Any, like: Any) -> Any:
        return result

    def like_splits(self, rows: list[int], splits: Any) -> Any:
        usual = torch.int32 if max(rows, default=0) < 2**31 else torch.int64
        dtype = splits.dtype if isinstance(splits, torch.Tensor) else usual
        return torch.tensor(rows, dtype=dtype)
