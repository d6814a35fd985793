"""NCCL's functions are called as nccl.h declares them: of a library that checks it."""

import subprocess

import pytest
import torch

SOURCE = """
#include <stddef.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
int ncclGetUniqueId(ncclUniqueId* id) {
  for (int i = 0; i < 128; ++i) id->internal[i] = (char)(200 + i);  // zeros among them
  return 0;
}
static int world;
int ncclCommInitRank(void** comm, int size, ncclUniqueId id, int rank) {
  for (int i = 0; i < 128; ++i)
    if (id.internal[i] != (char)(200 + i)) return 4;
  if (size != 1 || rank != 0) return 5;
  *comm = &world;
  return 0;
}
int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, void* comm,
                  void* stream) {
  if (comm != &world || type != 7 || op != 0 || in != out || stream) return 4;
  for (size_t i = 0; i < count; ++i) ((float*)out)[i] = 2 * ((const float*)in)[i];
  return count == 5 ? 3 : 0;
}
"""


@pytest.fixture
def library(tmp_path):
    source, path = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    return str(path)


@pytest.mark.ranks(1)
def test_sums(library):
    from benchmarks.raw_nccl import RawNccl

    nccl = RawNccl(path=library)
    values = torch.arange(1000.0)
    nccl.sum(values)()
    assert torch.equal(values, 2 * torch.arange(1000.0))
    with pytest.raises(RuntimeError, match="ncclAllReduce returned 3; NCCL_DEBUG=WARN"):
        nccl.sum(torch.zeros(5))()
