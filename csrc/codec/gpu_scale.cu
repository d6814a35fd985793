// Floats of 16 bits, multiplied: 16 bytes to a thread at a time, where they lie so.
#include "codec/gpu_kernels.h"
#include "codec/singles.h"

namespace bagua {
namespace {

constexpr int kThreads = 256;

template <class S>
struct alignas(16) Pack {
  static constexpr int kEach = 16 / sizeof(typename S::Wire);
  typename S::Wire of[kEach];
};

template <class S>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(typename S::Wire* data, int64_t packs, int64_t count, float factor) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < packs; i += step) {
    Pack<S> pack = reinterpret_cast<Pack<S>*>(data)[i];
#pragma unroll
    for (auto& x : pack.of) x = scaled<S>(x, factor);
    reinterpret_cast<Pack<S>*>(data)[i] = pack;
  }
  for (int64_t i = packs * Pack<S>::kEach + first; i < count; i += step)
    data[i] = scaled<S>(data[i], factor);
}

template <class S>
void launch(void* data, int64_t count, float factor, Device::Stream stream) {
  const bool whole = reinterpret_cast<uintptr_t>(data) % sizeof(Pack<S>) == 0;
  const int64_t packs = whole ? count / Pack<S>::kEach : 0;
  const int64_t blocks = ((whole ? packs : count) + kThreads - 1) / kThreads;
  const int grid = grid_of(blocks, reinterpret_cast<const void*>(scale_kernel<S>), kThreads, 0);
  scale_kernel<S><<<grid, kThreads, 0, as_cuda(stream)>>>(static_cast<typename S::Wire*>(data),
                                                          packs, count, factor);
}

}  // namespace

Scale scale_kernels(DType dtype) { return dtype == DType::kF16 ? launch<Half> : launch<BrainHalf>; }

}  // namespace bagua
