#include "codec/gpu.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "codec/gpu_kernels.h"
#include "common/errors.h"

namespace bagua {
namespace {

const Kernels& kernels_of(const Coding& coding) {
  const Kernels* found =
      coding.codec->sparse ? topk_kernels(coding.values->name) : value_kernels(coding.codec->name);
  if (!found) throw InternalError(std::string(coding.codec->name) + " has no kernels");
  return *found;
}

void check_place(const char* wire) {
  if (reinterpret_cast<uintptr_t>(wire) % 4 != 0)
    throw UsageError("on a GPU a wire begins at a multiple of 4 bytes");
}

template <class F>
void launch(Device& device, const char* wire, F&& kernel) {
  check_place(wire);
  device.as_current([&] {
    kernel();
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess)
      throw InternalError(std::string("a codec's kernel: ") + cudaGetErrorString(status));
  });
}

}  // namespace

void gpu_encode(const Coding& coding, const float* in, float* residual, int64_t count, char* wire,
                Device& device, Device::Stream stream) {
  if (count == 0) return;
  launch(device, wire,
         [&] { kernels_of(coding).encode(coding, in, residual, count, wire, stream); });
}

void gpu_decode(const Coding& coding, const char* wire, int64_t count, float* out, Device& device,
                Device::Stream stream) {
  if (count == 0) return;
  launch(device, wire, [&] { kernels_of(coding).decode(coding, wire, count, out, stream); });
}

void gpu_add_up(const Coding& coding, const char* const* wires, int nwires, Finish finish,
                float* residual, int64_t count, char* wire, float* out, Device& device,
                Device::Stream stream) {
  if (count == 0) return;
  if (nwires > kMostWires)
    throw InternalError("at most " + std::to_string(kMostWires) + " wires are added up at once");
  Wires all = {{}, nwires};
  std::copy_n(wires, nwires, all.of);
  for (int i = 0; i < nwires; ++i) check_place(wires[i]);
  launch(device, wire, [&] {
    kernels_of(coding).add_up(coding, all, finish, residual, count, wire, out, stream);
  });
}

}  // namespace bagua
