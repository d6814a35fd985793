// Tensors as they are: dense memory in C order, read without calling Python.
#pragma once

#include <Python.h>

#include <cstdint>

#include "common/types.h"
#include "device/device.h"

namespace bagua {

struct Plain {
  static constexpr int kMaxDims = 16;
  char* data;
  int device;  // its number, or kHost
  DType dtype;
  int ndim;
  int64_t shape[kMaxDims];

  int64_t count() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
  int64_t nbytes() const { return count() * static_cast<int64_t>(dtype_nbytes(dtype)); }
};

// Reads objects whose type offers DLPack's C exchange table, as torch's tensors do, and writable
// buffers, as NumPy's arrays. False, with no error set, for everything else and in doubt.
bool read_plain(PyObject* tensor, Plain& plain);
// The same without asking whether torch is to negate the values when it reads them.
bool read_memory(PyObject* tensor, Plain& plain);
// Whether its type offers that table.
bool is_exchangeable(PyObject* tensor);

// A device to ask about.
Device& any_device(int number);
// The device of a tensor. There is one to a process: a UsageError tells of a second, until the
// process begins with another engine.
Device& device_of(int number);
void choose_device_anew();
// The stream that torch, on this thread, gives work to.
Device::Stream current_stream(const Device& device);
// For tests: torch's tensors in the host's memory are taken for those of a pretended device, each
// copy of which takes so many microseconds.
void pretend(int work_us);
// Whether that is so: then the host can look at what is on a device.
bool pretends();
// A stream of that device, which torch can be taken to give work to; by itself it is one where all
// is done at once.
class PretendedStream {
 public:
  PretendedStream();
  void use() const;
  // What it does only after a while.
  void copy(uintptr_t to, uintptr_t from, size_t nbytes) const;
  void drain() const;

 private:
  Device::Stream stream_;
};

}  // namespace bagua
