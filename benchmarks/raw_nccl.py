"""NCCL as it is, called from Python: what an engine around it is measured against."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch
from mpi4py import MPI

from bagua.common.nccl import library_path

_NAME = "libnccl.so.2"
_FLOAT32, _SUM = 7, 0  # of nccl.h


class _Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 128)]


class RawNccl:
    """A communicator of all ranks, of the library that the engine uses."""

    def __init__(self, comm: MPI.Comm = MPI.COMM_WORLD, path: str = "") -> None:
        self._library = _loaded(path)
        mine = _Id()
        if comm.rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(mine))
        theirs = _Id.from_buffer_copy(comm.bcast(bytes(mine)))
        self._comm = ctypes.c_void_p()
        self._call("ncclCommInitRank", ctypes.byref(self._comm), comm.size, theirs, comm.rank)

    def sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """What sums up these float32 in place, on what is the current stream now.

        All is prepared, so that Python's share of a call is small.
        """
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        at = ctypes.c_void_p(tensor.data_ptr())
        count = ctypes.c_size_t(tensor.numel())
        stream = torch.cuda.current_stream().cuda_stream if tensor.is_cuda else None
        arguments = (at, at, count, _FLOAT32, _SUM, self._comm, ctypes.c_void_p(stream))
        all_reduce = self._library.ncclAllReduce

        def call(_: torch.Tensor = tensor) -> None:  # which stays as long as this
            if result := all_reduce(*arguments):
                raise failure("ncclAllReduce", result)

        return call

    def _call(self, name: str, *arguments: object) -> None:
        if result := getattr(self._library, name)(*arguments):
            raise failure(name, result)


def failure(name: str, result: int) -> RuntimeError:
    return RuntimeError(f"{name} returned {result}; NCCL_DEBUG=WARN tells more")


def _loaded(path: str) -> ctypes.CDLL:
    if path:
        return ctypes.CDLL(path)
    try:
        return ctypes.CDLL(_NAME, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return ctypes.CDLL(library_path() or _NAME)
