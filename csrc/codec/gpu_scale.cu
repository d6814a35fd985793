// Floats, multiplied: 16 bytes to a thread at a time, where they lie so.
#include <algorithm>

#include "codec/gpu_kernels.h"
#include "codec/singles.h"

namespace bagua {
namespace {

constexpr int kThreads = 256;

// No codec's format, but scaled alike.
struct Double {
  using Wire = double;
  __device__ static double code(double x) { return x; }
  __device__ static double value(double code) { return code; }
};
// What its values are computed with.
template <class S>
using Factor = decltype(S::value({}));

template <class S>
struct alignas(16) Pack {
  static constexpr int kEach = 16 / sizeof(typename S::Wire);
  typename S::Wire of[kEach];
};

template <class S>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(typename S::Wire* data, int64_t packs, int64_t count, Factor<S> factor) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < packs) {
    Pack<S> pack = reinterpret_cast<Pack<S>*>(data)[i];
#pragma unroll
    for (auto& x : pack.of) x = scaled<S>(x, factor);
    reinterpret_cast<Pack<S>*>(data)[i] = pack;
  }
  const int64_t loose = packs * Pack<S>::kEach + i;
  if (loose < count) data[loose] = scaled<S>(data[loose], factor);
}

template <class S>
void launch(void* data, int64_t count, double factor, Device::Stream stream) {
  const bool whole = reinterpret_cast<uintptr_t>(data) % sizeof(Pack<S>) == 0;
  const int64_t packs = whole ? count / Pack<S>::kEach : 0;
  const int64_t threads = whole ? std::max<int64_t>(packs, count % Pack<S>::kEach) : count;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  scale_kernel<S><<<blocks, kThreads, 0, as_cuda(stream)>>>(
      static_cast<typename S::Wire*>(data), packs, count, static_cast<Factor<S>>(factor));
}

}  // namespace

Scale scale_kernels(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return launch<Half>;
    case DType::kBF16:
      return launch<BrainHalf>;
    case DType::kF32:
      return launch<Float>;
    default:
      return launch<Double>;
  }
}

}  // namespace bagua
