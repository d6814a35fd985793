// Formats that code every value: a warp to a block, or a thread to a value.
#include "codec/fp8_e4m3.h"
#include "codec/gpu_kernels.h"
#include "codec/minmax_u4.h"
#include "codec/minmax_u8.h"
#include "codec/sign1.h"
#include "codec/singles.h"
#include "codec/warp.h"

namespace bagua {
namespace {

template <class C>
struct Blocks {
  using Shape = int64_t;
  // Who has many values in registers has few neighbours.
  static constexpr bool kLarge = Lanes<C>::kEach > 16;
  static constexpr int kThreads = kLarge ? 128 : 256, kAtOnce = 4;
  static int64_t shape(const Coding&, int64_t count) { return count; }
  static int64_t blocks(int64_t count) {
    constexpr int64_t kEach = C::kBlock * (kThreads / kLanes);
    return (count + kEach - 1) / kEach;
  }
  static int shared_nbytes(int64_t) { return 0; }

  // Calls f(warp, values' begin, how many, wire's begin) for each block.
  template <class F>
  __device__ static void for_each(int64_t count, F&& f) {
    constexpr int64_t kWhole = block_nbytes<C>(C::kBlock);
    const int64_t blocks = (count + C::kBlock - 1) / C::kBlock;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kLanes);
    // Told by one lane, so that the compiler knows that lanes stay together.
    const uint32_t mine = GpuWarp().first(threadIdx.x / kLanes);
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + mine;
    for (int64_t block = first; block < blocks; block += warps) {
      const int64_t begin = block * C::kBlock;
      const int64_t left = count - begin;
      if (left >= C::kBlock) {  // the compiler makes the most of a known size
        f(GpuWarp(), begin, C::kBlock, block * kWhole);
      } else {
        f(GpuWarp(), begin, static_cast<int>(left) % C::kBlock, block * kWhole);
      }
    }
  }

  __device__ static void encode(int64_t count, const float* in, float* residual, uint8_t* wire) {
    for_each(count, [&](const GpuWarp& warp, int64_t begin, int n, int64_t at) {
      Values<C> values = {};
      load<C>(warp, in + begin, n, values);
      if (residual) load_on_top<C>(warp, residual + begin, n, values);
      encode_block<C>(warp, values, n, wire + at, nullptr, residual ? residual + begin : nullptr);
    });
  }
  __device__ static void decode(int64_t count, const uint8_t* wire, float* out) {
    for_each(count, [&](const GpuWarp& warp, int64_t begin, int n, int64_t at) {
      Values<C> values = {};
      decode_block<C, false>(warp, wire + at, n, values);
      store<C>(warp, values, n, out + begin);
    });
  }
  __device__ static void add_up(int64_t count, const Wires& wires, Finishing finish,
                                float* residual, uint8_t* wire, float* out) {
    for_each(count, [&](const GpuWarp& warp, int64_t begin, int n, int64_t at) {
      Values<C> sum = {};
#pragma unroll 4  // of several the codes are loaded before the first is used
      for (int i = 0; i < wires.count; ++i)
        decode_block<C, true>(warp, wire_of(wires, i) + at, n, sum);
      finish.all(sum.of);
      if (residual) load_on_top<C>(warp, residual + begin, n, sum);
      encode_block<C>(warp, sum, n, wire + at, out + begin, residual ? residual + begin : nullptr);
    });
  }
};

template <class S>
struct Singles {
  using Shape = int64_t;
  using Wire = typename S::Wire;
  static constexpr int kThreads = 256, kAtOnce = 1;
  static int64_t shape(const Coding&, int64_t count) { return count; }
  static int64_t blocks(int64_t count) { return (count + kThreads - 1) / kThreads; }
  static int shared_nbytes(int64_t) { return 0; }

  template <class F>
  __device__ static void for_each(int64_t count, F&& f) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    for (int64_t i = first; i < count; i += step) f(i);
  }

  __device__ static Wire code(float x, float* residual, int64_t i) {
    if (!residual) return S::code(x);
    const float whole = x + residual[i];
    const Wire code = S::code(whole);
    residual[i] = finite_or_zero(whole - S::value(code));
    return code;
  }

  __device__ static void encode(int64_t count, const float* in, float* residual, uint8_t* wire) {
    auto* to = reinterpret_cast<Wire*>(wire);
    for_each(count, [&](int64_t i) { to[i] = code(in[i], residual, i); });
  }
  __device__ static void decode(int64_t count, const uint8_t* wire, float* out) {
    auto* from = reinterpret_cast<const Wire*>(wire);
    for_each(count, [&](int64_t i) { out[i] = S::value(from[i]); });
  }
  __device__ static void add_up(int64_t count, const Wires& wires, Finishing finish,
                                float* residual, uint8_t* wire, float* out) {
    auto* to = reinterpret_cast<Wire*>(wire);
    for_each(count, [&](int64_t i) {
      float sum = 0.0f;
      for (int k = 0; k < wires.count; ++k)
        sum += S::value(reinterpret_cast<const Wire*>(wire_of(wires, k))[i]);
      to[i] = code(finish(sum), residual, i);
      out[i] = S::value(to[i]);
    });
  }
};

}  // namespace

const Kernels* value_kernels(const std::string& name) {
  static constexpr Kernels table[] = {
      kernels<Singles<Float>>("raw"),         kernels<Singles<Half>>("fp16"),
      kernels<Singles<BrainHalf>>("bf16"),    kernels<Blocks<MinMaxU8>>("minmax_u8"),
      kernels<Blocks<MinMaxU4>>("minmax_u4"), kernels<Blocks<Fp8E4M3>>("fp8_e4m3"),
      kernels<Blocks<Sign1>>("sign1"),
  };
  return find(table, name);
}

}  // namespace bagua
