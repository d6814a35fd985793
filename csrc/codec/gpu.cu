#include "codec/gpu.h"

#include <algorithm>
#include <string>

#include "codec/fp8_e4m3.h"
#include "codec/minmax_u4.h"
#include "codec/minmax_u8.h"
#include "codec/sign1.h"
#include "codec/warp.h"
#include "common/errors.h"
#include "kernel/half.h"

namespace bagua {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 132 * 16;  // of threads; each goes on with what is left

struct GpuWarp {
  static constexpr unsigned kAll = 0xffffffffu;
  __device__ int lane() const { return static_cast<int>(threadIdx.x % kLanes); }
  __device__ uint32_t down(uint32_t x, int d) const { return __shfl_down_sync(kAll, x, d); }
  __device__ uint32_t first(uint32_t x) const { return __shfl_sync(kAll, x, 0); }
  __device__ uint32_t vote(bool b) const { return __ballot_sync(kAll, b); }
};

struct Wires {
  const char* of[kMostWires];
  int count;
};

__device__ float finished(float sum, float divisor, float factor) { return sum / divisor * factor; }

// ---- block formats: a warp to a block -----------------------------------------------------------

template <class C>
constexpr int kWhole = static_cast<int>(sizeof(typename C::Head)) + C::kBlock * C::kBits / 8;

// Calls f(warp, values' begin, how many, wire's begin) for each block.
template <class C, class F>
__device__ void for_blocks(int64_t count, F&& f) {
  const int64_t blocks = (count + C::kBlock - 1) / C::kBlock;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kLanes);
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  for (int64_t block = first; block < blocks; block += warps) {
    const int64_t begin = block * C::kBlock;
    const int n = static_cast<int>(count - begin < C::kBlock ? count - begin : C::kBlock);
    f(GpuWarp(), begin, n, block * kWhole<C>);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const float* in, float* residual, int64_t count, uint8_t* wire) {
  for_blocks<C>(count, [&](const GpuWarp& warp, int64_t begin, int n, int64_t at) {
    Values<C> values = {};
    load<C>(warp, in + begin, n, values);
    if (residual) {
      Values<C> lost = {};
      load<C>(warp, residual + begin, n, lost);
      for (int k = 0; k < Lanes<C>::kEach; ++k) values.of[k] += lost.of[k];
    }
    encode_block<C>(warp, values, n, wire + at, nullptr, residual ? residual + begin : nullptr);
  });
}

template <class C>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const uint8_t* wire, int64_t count, float* out) {
  for_blocks<C>(count, [&](const GpuWarp& warp, int64_t begin, int n, int64_t at) {
    Values<C> values = {};
    decode_block<C, false>(warp, wire + at, n, values);
    store<C>(warp, values, n, out + begin);
  });
}

template <class C>
__global__ void __launch_bounds__(kThreads)
    add_up_kernel(Wires wires, float divisor, float factor, float* residual, int64_t count,
                  uint8_t* wire, float* out) {
  for_blocks<C>(count, [&](const GpuWarp& warp, int64_t begin, int n, int64_t at) {
    Values<C> sum = {};
    for (int i = 0; i < wires.count; ++i)
      decode_block<C, true>(warp, reinterpret_cast<const uint8_t*>(wires.of[i]) + at, n, sum);
    if (divisor != 1 || factor != 1)
      for (float& x : sum.of) x = finished(x, divisor, factor);
    if (residual) {
      Values<C> lost = {};
      load<C>(warp, residual + begin, n, lost);
      for (int k = 0; k < Lanes<C>::kEach; ++k) sum.of[k] += lost.of[k];
    }
    encode_block<C>(warp, sum, n, wire + at, out + begin, residual ? residual + begin : nullptr);
  });
}

// ---- formats of single values -------------------------------------------------------------------

struct Float {
  using Wire = float;
  static __device__ float code(float x) { return x; }
  static __device__ float value(float code) { return code; }
};
struct Half {
  using Wire = F16;
  static __device__ F16 code(float x) { return to_f16(x); }
  static __device__ float value(F16 code) { return to_float(code); }
};
struct BrainHalf {
  using Wire = BF16;
  static __device__ BF16 code(float x) { return to_bf16(x); }
  static __device__ float value(BF16 code) { return to_float(code); }
};

template <class F>
__device__ void for_each(int64_t count, F&& f) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step)
    f(i);
}

template <class S>
__device__ typename S::Wire told(float x, float* residual, int64_t i) {
  if (!residual) return S::code(x);
  const float whole = x + residual[i];
  const typename S::Wire code = S::code(whole);
  residual[i] = finite_or_zero(whole - S::value(code));
  return code;
}

template <class S>
__global__ void encode_single(const float* in, float* residual, int64_t count,
                              typename S::Wire* wire) {
  for_each(count, [&](int64_t i) { wire[i] = told<S>(in[i], residual, i); });
}
template <class S>
__global__ void decode_single(const typename S::Wire* wire, int64_t count, float* out) {
  for_each(count, [&](int64_t i) { out[i] = S::value(wire[i]); });
}
template <class S>
__global__ void add_up_single(Wires wires, float divisor, float factor, float* residual,
                              int64_t count, typename S::Wire* wire, float* out) {
  for_each(count, [&](int64_t i) {
    float sum = 0.0f;
    for (int k = 0; k < wires.count; ++k)
      sum += S::value(reinterpret_cast<const typename S::Wire*>(wires.of[k])[i]);
    if (divisor != 1 || factor != 1) sum = finished(sum, divisor, factor);
    wire[i] = told<S>(sum, residual, i);
    out[i] = S::value(wire[i]);
  });
}

// ---- the table ----------------------------------------------------------------------------------

int blocks_for(int64_t items, int per_block) {
  return static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>((items + per_block - 1) / per_block, kMostBlocks)));
}

void check_launch() {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess)
    throw InternalError(std::string("a codec's kernel: ") + cudaGetErrorString(status));
}

template <class C>
struct OfBlocks {
  static int grid(int64_t count) {
    return blocks_for((count + C::kBlock - 1) / C::kBlock, kThreads / kLanes);
  }
  static void encode(const float* in, float* residual, int64_t count, char* wire, cudaStream_t s) {
    encode_kernel<C>
        <<<grid(count), kThreads, 0, s>>>(in, residual, count, reinterpret_cast<uint8_t*>(wire));
  }
  static void decode(const char* wire, int64_t count, float* out, cudaStream_t s) {
    decode_kernel<C>
        <<<grid(count), kThreads, 0, s>>>(reinterpret_cast<const uint8_t*>(wire), count, out);
  }
  static void add_up(const Wires& wires, Finish f, float* residual, int64_t count, char* wire,
                     float* out, cudaStream_t s) {
    add_up_kernel<C><<<grid(count), kThreads, 0, s>>>(wires, static_cast<float>(f.divisor),
                                                      static_cast<float>(f.factor), residual, count,
                                                      reinterpret_cast<uint8_t*>(wire), out);
  }
};

template <class S>
struct OfSingles {
  using Wire = typename S::Wire;
  static int grid(int64_t count) { return blocks_for(count, kThreads); }
  static void encode(const float* in, float* residual, int64_t count, char* wire, cudaStream_t s) {
    encode_single<S>
        <<<grid(count), kThreads, 0, s>>>(in, residual, count, reinterpret_cast<Wire*>(wire));
  }
  static void decode(const char* wire, int64_t count, float* out, cudaStream_t s) {
    decode_single<S>
        <<<grid(count), kThreads, 0, s>>>(reinterpret_cast<const Wire*>(wire), count, out);
  }
  static void add_up(const Wires& wires, Finish f, float* residual, int64_t count, char* wire,
                     float* out, cudaStream_t s) {
    add_up_single<S><<<grid(count), kThreads, 0, s>>>(wires, static_cast<float>(f.divisor),
                                                      static_cast<float>(f.factor), residual, count,
                                                      reinterpret_cast<Wire*>(wire), out);
  }
};

struct Row {
  const char* name;
  void (*encode)(const float*, float*, int64_t, char*, cudaStream_t);
  void (*decode)(const char*, int64_t, float*, cudaStream_t);
  void (*add_up)(const Wires&, Finish, float*, int64_t, char*, float*, cudaStream_t);
};
template <class T>
constexpr Row row(const char* name) {
  return {name, T::encode, T::decode, T::add_up};
}

const Row& row_of(const Coding& coding) {
  static constexpr Row rows[] = {
      row<OfSingles<Float>>("raw"),         row<OfSingles<Half>>("fp16"),
      row<OfSingles<BrainHalf>>("bf16"),    row<OfBlocks<MinMaxU8>>("minmax_u8"),
      row<OfBlocks<MinMaxU4>>("minmax_u4"), row<OfBlocks<Fp8E4M3>>("fp8_e4m3"),
      row<OfBlocks<Sign1>>("sign1"),
  };
  for (const Row& row : rows)
    if (std::string(row.name) == coding.codec->name) return row;
  throw InternalError(std::string(coding.codec->name) + " has no kernels");
}

}  // namespace

void gpu_encode(const Coding& coding, const float* in, float* residual, int64_t count, char* wire,
                Device::Stream stream) {
  if (count == 0) return;
  row_of(coding).encode(in, residual, count, wire, static_cast<cudaStream_t>(stream));
  check_launch();
}

void gpu_decode(const Coding& coding, const char* wire, int64_t count, float* out,
                Device::Stream stream) {
  if (count == 0) return;
  row_of(coding).decode(wire, count, out, static_cast<cudaStream_t>(stream));
  check_launch();
}

void gpu_add_up(const Coding& coding, const char* const* wires, int nwires, Finish finish,
                float* residual, int64_t count, char* wire, float* out, Device::Stream stream) {
  if (count == 0) return;
  if (nwires > kMostWires) throw InternalError("at most 64 wires are added up at once");
  Wires all = {{}, nwires};
  std::copy_n(wires, nwires, all.of);
  row_of(coding).add_up(all, finish, residual, count, wire, out, static_cast<cudaStream_t>(stream));
  check_launch();
}

}  // namespace bagua
