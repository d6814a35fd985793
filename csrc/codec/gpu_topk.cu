// topk: a warp to a chunk.
#include "codec/fp8_e4m3.h"
#include "codec/gpu_kernels.h"
#include "codec/minmax_u4.h"
#include "codec/minmax_u8.h"
#include "codec/singles.h"
#include "codec/warp_topk.h"

namespace bagua {
namespace {

template <class V>
struct Chunks {
  // The whole chunks are alike, the last may be shorter.
  struct Shape {
    int64_t count;
    KeptPart whole, last;
  };
  static constexpr int kThreads = kLanes, kAtOnce = 9;  // an H100's memory is for 9
  static Shape shape(const Coding& coding, int64_t count) {
    const auto kept = [&](int64_t n) {
      const int64_t some = TopK::kept_of(coding, n);
      const int64_t coded_nbytes = coding.values->wire_nbytes(coding, some);
      return KeptPart{static_cast<int>(some), static_cast<int>(coded_nbytes)};
    };
    return {count, kept(kChunk), kept(count % kChunk)};
  }
  static int64_t blocks(int64_t count) { return (count + kChunk - 1) / kChunk; }
  static int shared_nbytes(const Shape& shape) { return Desk::nbytes(shape.whole); }

  // Calls f(warp, desk, values' begin, how many, wire's begin) for the warp's chunk.
  template <class F>
  __device__ static void visit(const Shape& shape, F&& f) {
    extern __shared__ __align__(16) char memory[];
    const int64_t begin = blockIdx.x * int64_t{kChunk}, left = shape.count - begin;
    const bool whole = left >= kChunk;
    const int64_t at = blockIdx.x * int64_t{shape.whole.nbytes()};
    f(GpuWarp(), Desk(memory, whole ? shape.whole : shape.last), begin,
      whole ? kChunk : static_cast<int>(left), at);
  }
  // The sum of what the wires say of a chunk, finished.
  __device__ static void add_up(const GpuWarp& warp, const Desk& desk, const Wires& wires,
                                int64_t at, int n, const Finishing& finish, ChunkValues& sum) {
    const auto from = [&](int i) { return wire_of(wires, i) + at; };
    add_up_chunk<V>(warp, desk, wires.count, from, n, sum);
    finish.all(sum.of);
  }

  __device__ static void encode(const Shape& shape, const float* in, float* residual,
                                uint8_t* wire) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, int64_t begin, int n, int64_t at) {
      float* lost = residual ? residual + begin : nullptr;
      ChunkValues values;
      load_chunk(warp, desk, in + begin, lost, n, values);
      encode_chunk<V>(warp, desk, values, n, wire + at, nullptr, lost);
    });
  }
  __device__ static void decode(const Shape& shape, const uint8_t* wire, float* out) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, int64_t begin, int n, int64_t at) {
      decode_chunk<V>(warp, desk, wire + at, n, out + begin);
    });
  }
  __device__ static void add_up(const Shape& shape, const Wires& wires, Finishing finish,
                                float* residual, uint8_t* wire, float* out) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, int64_t begin, int n, int64_t at) {
      float* lost = residual ? residual + begin : nullptr;
      ChunkValues sum;
      add_up(warp, desk, wires, at, n, finish, sum);
      if (lost) load_on_top<TopKChunk>(warp, lost, n, sum);
      encode_chunk<V>(warp, desk, sum, n, wire + at, out + begin, lost);
    });
  }
  __device__ static void sum(const Shape& shape, const Wires& wires, Finishing finish, float* out) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, int64_t begin, int n, int64_t at) {
      ChunkValues sum;
      add_up(warp, desk, wires, at, n, finish, sum);
      store_chunk(warp, desk, sum, n, out + begin);
    });
  }
};

}  // namespace

const Kernels* topk_kernels(const std::string& name) {
  static constexpr Kernels table[] = {
      sparse_kernels<Chunks<KeptSingles<Float>>>("raw"),
      sparse_kernels<Chunks<KeptSingles<Half>>>("fp16"),
      sparse_kernels<Chunks<KeptSingles<BrainHalf>>>("bf16"),
      sparse_kernels<Chunks<KeptBlocks<MinMaxU8>>>("minmax_u8"),
      sparse_kernels<Chunks<KeptBlocks<MinMaxU4>>>("minmax_u4"),
      sparse_kernels<Chunks<KeptBlocks<Fp8E4M3>>>("fp8_e4m3"),
  };
  return find(table, name);
}

}  // namespace bagua
