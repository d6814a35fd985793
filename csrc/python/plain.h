// Tensors as they are: dense CPU memory in C order, read without calling Python.
#pragma once

#include <Python.h>

#include <cstdint>

#include "common/types.h"

namespace bagua {

struct Plain {
  static constexpr int kMaxDims = 16;
  char* data;
  DType dtype;
  int ndim;
  int64_t shape[kMaxDims];

  int64_t count() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
};

// Reads objects whose type offers DLPack's C exchange table, as torch's tensors do, and writable
// buffers, as NumPy's arrays. False, with no error set, for everything else and in doubt.
bool read_plain(PyObject* tensor, Plain& plain);

}  // namespace bagua
