// What the kernels of all codecs have in common. A family of kernels says
//   Shape, shape(coding, count)  what its kernels are told of the values and their wires
//   kThreads, blocks(count)      threads of a block, and how many of those blocks there is work for
//   kAtOnce                      blocks that a multiprocessor has registers for, at least
//   shared_nbytes(shape)         memory that the threads of a block share
//   encode, decode, add_up       what one of the threads does, for the piece of work that is its
//                                block's; of sparse codecs sum, too
#pragma once

#include <string>

#include "codec/format.h"
#include "codec/gpu.h"

namespace bagua {

// How a codec is launched; topk by the name of the codec for its values. Null: there are none.
struct Kernels {
  const char* name;
  void (*encode)(const Coding&, const float*, float*, int64_t, char*, Device::Stream);
  void (*decode)(const Coding&, const char*, int64_t, float*, Device::Stream);
  void (*add_up)(const Coding&, const Wires&, Finish, float*, int64_t, char*, float*,
                 Device::Stream);
  void (*sum)(const Coding&, const Wires&, Finish, int64_t, float*, Device::Stream);  // or null
};
const Kernels* value_kernels(const std::string& name);
const Kernels* topk_kernels(const std::string& name);
// How floats are multiplied, see gpu_scale.
using Scale = void (*)(void*, int64_t, double, Device::Stream);
Scale scale_kernels(DType dtype);

#ifdef __CUDACC__

struct GpuWarp {
  static constexpr unsigned kAll = 0xffffffffu;
  __device__ int lane() const { return static_cast<int>(threadIdx.x % kLanes); }
  __device__ uint32_t down(uint32_t x, int d) const { return __shfl_down_sync(kAll, x, d); }
  __device__ uint32_t across(uint32_t x, int d) const { return __shfl_xor_sync(kAll, x, d); }
  __device__ uint32_t first(uint32_t x) const { return __shfl_sync(kAll, x, 0); }
  __device__ uint32_t sum(uint32_t x) const { return __reduce_add_sync(kAll, x); }
  __device__ uint32_t most(uint32_t x) const { return __reduce_max_sync(kAll, x); }
  __device__ void sync() const { __syncwarp(); }
};

__device__ inline const uint8_t* wire_of(const Wires& wires, int i) {
  return reinterpret_cast<const uint8_t*>(wires.first) + i * wires.stride;
}

// What becomes of a sum.
struct Finishing {
  explicit Finishing(const Finish& finish)
      : divisor(static_cast<float>(finish.divisor)),
        factor(static_cast<float>(finish.factor)),
        inverse(static_cast<float>(exact_inverse(finish.divisor))) {}
  // The way is chosen once for all.
  template <int N>
  __device__ void all(float (&sums)[N]) const {
    if (inverse != 0) {
#pragma unroll
      for (float& sum : sums) sum = sum * inverse * factor;
    } else {
#pragma unroll
      for (float& sum : sums) sum = sum / divisor * factor;
    }
  }

  float divisor, factor, inverse;
};

inline cudaStream_t as_cuda(Device::Stream stream) { return static_cast<cudaStream_t>(stream); }

template <class K>
__global__ void __launch_bounds__(K::kThreads, K::kAtOnce)
    encode_kernel(typename K::Shape shape, const float* in, float* residual, uint8_t* wire) {
  K::encode(shape, in, residual, wire);
}
template <class K>
__global__ void __launch_bounds__(K::kThreads, K::kAtOnce)
    decode_kernel(typename K::Shape shape, const uint8_t* wire, float* out) {
  K::decode(shape, wire, out);
}
template <class K>
__global__ void __launch_bounds__(K::kThreads, K::kAtOnce)
    add_up_kernel(typename K::Shape shape, Wires wires, Finishing finish, float* residual,
                  uint8_t* wire, float* out) {
  K::add_up(shape, wires, finish, residual, wire, out);
}
template <class K>
__global__ void __launch_bounds__(K::kThreads, K::kAtOnce)
    sum_kernel(typename K::Shape shape, Wires wires, Finishing finish, float* out) {
  K::sum(shape, wires, finish, out);
}

template <class K>
struct Launch {
  template <class... Takes, class... Args>
  static void launch(void (*kernel)(typename K::Shape, Takes...), const Coding& coding,
                     int64_t count, Device::Stream stream, Args... args) {
    const typename K::Shape shape = K::shape(coding, count);
    const int nbytes = K::shared_nbytes(shape);
    if (nbytes > 48 << 10)  // more than usual is asked for
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, nbytes);
    kernel<<<static_cast<unsigned>(K::blocks(count)), K::kThreads, nbytes, as_cuda(stream)>>>(
        shape, args...);
  }
  static void encode(const Coding& coding, const float* in, float* residual, int64_t count,
                     char* wire, Device::Stream stream) {
    launch(encode_kernel<K>, coding, count, stream, in, residual, reinterpret_cast<uint8_t*>(wire));
  }
  static void decode(const Coding& coding, const char* wire, int64_t count, float* out,
                     Device::Stream stream) {
    launch(decode_kernel<K>, coding, count, stream, reinterpret_cast<const uint8_t*>(wire), out);
  }
  static void add_up(const Coding& coding, const Wires& wires, Finish f, float* residual,
                     int64_t count, char* wire, float* out, Device::Stream stream) {
    launch(add_up_kernel<K>, coding, count, stream, wires, Finishing(f), residual,
           reinterpret_cast<uint8_t*>(wire), out);
  }
  static void sum(const Coding& coding, const Wires& wires, Finish f, int64_t count, float* out,
                  Device::Stream stream) {
    launch(sum_kernel<K>, coding, count, stream, wires, Finishing(f), out);
  }
};

template <class K>
constexpr Kernels kernels(const char* name) {
  return {name, Launch<K>::encode, Launch<K>::decode, Launch<K>::add_up, nullptr};
}
template <class K>
constexpr Kernels sparse_kernels(const char* name) {
  Kernels all = kernels<K>(name);
  all.sum = Launch<K>::sum;
  return all;
}

template <size_t N>
const Kernels* find(const Kernels (&table)[N], const std::string& name) {
  for (const Kernels& row : table)
    if (row.name == name) return &row;
  return nullptr;
}

#endif

}  // namespace bagua
