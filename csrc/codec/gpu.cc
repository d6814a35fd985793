#include "codec/gpu.h"

#include <algorithm>
#include <string>
#include <vector>

#include "codec/gpu_kernels.h"
#include "common/errors.h"

namespace bagua {
namespace {

const Kernels* find_kernels(const Coding& coding) {
  const std::string name = coding.codec->name;
  return name == "topk" ? topk_kernels(coding.values->name) : value_kernels(name);
}

const Kernels& kernels_of(const Coding& coding) {
  const Kernels* found = find_kernels(coding);
  if (!found) throw InternalError(std::string("no kernels for ") + coding.codec->name);
  return *found;
}

// Halves are loaded at multiples of 2 bytes, which is where tensors of them may begin.
void check_place(const Coding& coding, const char* wire) {
  const int64_t place = std::min<int64_t>(coding.wire_nbytes(1), 4);
  if (reinterpret_cast<uintptr_t>(wire) % static_cast<uintptr_t>(place) != 0)
    throw UsageError("on a GPU a wire of " + std::string(coding.codec->name) +
                     " begins at a multiple of " + std::to_string(place) + " bytes");
}

void check_places(const Coding& coding, const Wires& wires) {
  for (int i = 0; i < wires.count; ++i) check_place(coding, wires.first + i * wires.stride);
}

std::vector<const char*> said_by(const Wires& wires) {
  std::vector<const char*> said;
  for (int i = 0; i < wires.count; ++i) said.push_back(wires.first + i * wires.stride);
  return said;
}

}  // namespace

bool gpu_codes(const Coding& coding) {
  const bool built = value_kernels("raw") != nullptr;
  return !built || find_kernels(coding);
}

void gpu_encode(const Coding& coding, const float* in, float* residual, int64_t count, char* wire,
                Device& device, Device::Stream stream) {
  if (count == 0) return;
  check_place(coding, wire);
  const auto on_host = [=] { coding.encode_rest(in, residual, count, wire); };
  if (device.works_on_host(stream, on_host)) return;
  device.as_current([&] { kernels_of(coding).encode(coding, in, residual, count, wire, stream); });
}

void gpu_decode(const Coding& coding, const char* wire, int64_t count, float* out, Device& device,
                Device::Stream stream) {
  if (count == 0) return;
  check_place(coding, wire);
  const auto on_host = [=] { coding.decode(wire, count, out); };
  if (device.works_on_host(stream, on_host)) return;
  device.as_current([&] { kernels_of(coding).decode(coding, wire, count, out, stream); });
}

void gpu_sum(const Coding& coding, const Wires& wires, Finish finish, int64_t count, float* out,
             Device& device, Device::Stream stream) {
  if (!coding.codec->sparse) throw UsageError("what a dense codec sums up, it encodes");
  if (count == 0) return;
  check_places(coding, wires);
  const auto on_host = [=] { coding.add_up(said_by(wires), finish, count, out); };
  if (device.works_on_host(stream, on_host)) return;
  device.as_current([&] { kernels_of(coding).sum(coding, wires, finish, count, out, stream); });
}

void gpu_add_up(const Coding& coding, const Wires& wires, Finish finish, float* residual,
                int64_t count, char* wire, float* out, Device& device, Device::Stream stream) {
  if (count == 0) return;
  check_place(coding, wire);
  check_places(coding, wires);
  const auto on_host = [=] {
    coding.add_up(said_by(wires), finish, count, out);
    coding.encode_rest(out, residual, count, wire);
    coding.decode(wire, count, out);
  };
  if (device.works_on_host(stream, on_host)) return;
  device.as_current([&] {
    kernels_of(coding).add_up(coding, wires, finish, residual, count, wire, out, stream);
  });
}

void gpu_scale(DType dtype, void* data, int64_t count, double factor, Device& device,
               Device::Stream stream) {
  if (count == 0) return;
  const auto on_host = [=] { scale(dtype, data, count, factor); };
  if (device.works_on_host(stream, on_host)) return;
  device.as_current([&] { scale_kernels(dtype)(data, count, factor, stream); });
}

}  // namespace bagua
