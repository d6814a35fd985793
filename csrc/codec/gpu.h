// Codecs on a GPU: the same bytes, in memory of the device. Everything is given to a stream;
// nothing waits. Wires begin at multiples of 4 bytes, those of fp16 and bf16 of 2.
#pragma once

#include <cstdint>

#include "codec/codec.h"
#include "device/device.h"
#include "kernel/reduce.h"

namespace bagua {

// Several of them, at equal distances.
struct Wires {
  const char* first;
  int64_t stride;
  int count;
};

// Whether there are kernels for it; a build without any has only devices that work on the host.
bool gpu_codes(const Coding& coding);
// Encodes values, plus what is in `residual` if it is not null; that becomes what encoding loses.
void gpu_encode(const Coding& coding, const float* in, float* residual, int64_t count, char* wire,
                Device& device, Device::Stream stream);
void gpu_decode(const Coding& coding, const char* wire, int64_t count, float* out, Device& device,
                Device::Stream stream);
// Adds up what several wires say, in order, and finishes the sum. It is encoded, with its own
// residual, and `out` becomes what that says.
void gpu_add_up(const Coding& coding, const Wires& wires, Finish finish, float* residual,
                int64_t count, char* wire, float* out, Device& device, Device::Stream stream);

// Adds up what several wires of a sparse codec say, in order, and finishes the sum.
void gpu_sum(const Coding& coding, const Wires& wires, Finish finish, int64_t count, float* out,
             Device& device, Device::Stream stream);

// Multiplies floats; those of 16 bits as floats of 32, and rounds once.
void gpu_scale(DType dtype, void* data, int64_t count, double factor, Device& device,
               Device::Stream stream);

}  // namespace bagua
