// Formats that code every value: a warp to a block, or threads to a tile.
#include "codec/fp8_e4m3.h"
#include "codec/gpu_kernels.h"
#include "codec/minmax_u4.h"
#include "codec/minmax_u8.h"
#include "codec/sign1.h"
#include "codec/singles.h"
#include "codec/tile.h"
#include "codec/warp.h"

namespace bagua {
namespace {

template <class C>
struct Blocks {
  using Shape = int64_t;
  // Who has many values in registers has few neighbours: with one more, sign1 would spill some.
  static constexpr int kThreads = 128, kAtOnce = Lanes<C>::kEach > 16 ? 3 : 8;
  static int64_t shape(const Coding&, int64_t count) { return count; }
  static int64_t blocks(int64_t count) {
    constexpr int64_t kEach = C::kBlock * (kThreads / kLanes);
    return (count + kEach - 1) / kEach;
  }
  static int shared_nbytes(int64_t) { return 0; }

  // Calls f(warp, values' begin, how many, wire's begin) for the warp's block, if there is one.
  template <class F>
  __device__ static void visit(int64_t count, F&& f) {
    constexpr int64_t kWhole = block_nbytes<C>(C::kBlock);
    // Told by one lane, so that the compiler knows that lanes stay together.
    const uint32_t mine = GpuWarp().first(threadIdx.x / kLanes);
    const int64_t block = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + mine;
    const int64_t begin = block * C::kBlock, left = count - begin;
    if (left >= C::kBlock) {  // the compiler makes the most of a known size
      f(GpuWarp(), begin, C::kBlock, block * kWhole);
    } else if (left > 0) {
      f(GpuWarp(), begin, static_cast<int>(left) % C::kBlock, block * kWhole);
    }
  }

  __device__ static void encode(int64_t count, const float* in, float* residual, uint8_t* wire) {
    visit(count, [&](const GpuWarp& warp, int64_t begin, int n, int64_t at) {
      Values<C> values = {};
      load<C>(warp, in + begin, n, values);
      if (residual) load_on_top<C>(warp, residual + begin, n, values);
      encode_block<C>(warp, values, n, wire + at, nullptr, residual ? residual + begin : nullptr);
    });
  }
  __device__ static void decode(int64_t count, const uint8_t* wire, float* out) {
    visit(count, [&](const GpuWarp& warp, int64_t begin, int n, int64_t at) {
      Values<C> values = {};
      decode_block<C, false>(warp, wire + at, n, values);
      store<C>(warp, values, n, out + begin);
    });
  }
  __device__ static void add_up(int64_t count, const Wires& wires, Finishing finish,
                                float* residual, uint8_t* wire, float* out) {
    visit(count, [&](const GpuWarp& warp, int64_t begin, int n, int64_t at) {
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
  using T = Tile<S>;
  using Wire = typename S::Wire;
  static constexpr int kThreads = T::kThreads, kAtOnce = 4;
  static int64_t shape(const Coding&, int64_t count) { return count; }
  static int64_t blocks(int64_t count) { return (count + T::kValues - 1) / T::kValues; }
  static int shared_nbytes(int64_t) { return 0; }

  template <class F>
  __device__ static void visit(int64_t count, bool aligned, F&& f) {
    T::visit(static_cast<int>(threadIdx.x), blockIdx.x * int64_t{T::kValues}, count, aligned, f);
  }

  __device__ static void encode(int64_t count, const float* in, float* residual, uint8_t* wire) {
    auto* to = reinterpret_cast<Wire*>(wire);
    visit(count, in_sides(in) && in_sides(residual) && in_sides(to),
          [&](const auto& place) { T::encode(place, in, residual, to); });
  }
  __device__ static void decode(int64_t count, const uint8_t* wire, float* out) {
    auto* from = reinterpret_cast<const Wire*>(wire);
    visit(count, in_sides(from) && in_sides(out),
          [&](const auto& place) { T::decode(place, from, out); });
  }
  __device__ static void add_up(int64_t count, const Wires& wires, Finishing finish,
                                float* residual, uint8_t* wire, float* out) {
    auto* to = reinterpret_cast<Wire*>(wire);
    const auto from = [&](int i) { return reinterpret_cast<const Wire*>(wire_of(wires, i)); };
    bool aligned = in_sides(residual) && in_sides(to) && in_sides(out);
    for (int i = 0; i < wires.count && i < 2; ++i)  // then all are: distances are equal
      aligned = aligned && in_sides(from(i));
    visit(count, aligned, [&](const auto& place) {
      const auto finish_all = [&](auto& sums) { finish.all(sums); };
      T::add_up(place, wires.count, from, finish_all, residual, to, out);
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
