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
  static constexpr int kThreads = kLanes, kAtOnce = 9;  // 228 KB have room for 9 desks
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

  // Where the values of the warp's chunk begin, where its wire does, and how many values it has.
  struct Work {
    int64_t begin, at;
    int n;
  };
  template <class F>
  __device__ static void visit(const Shape& shape, F&& f) {
    extern __shared__ __align__(16) char memory[];
    const int64_t i = blockIdx.x, begin = i * kChunk, left = shape.count - begin;
    const bool whole = left >= kChunk;
    f(GpuWarp(), Desk(memory, whole ? shape.whole : shape.last),
      Work{begin, i * shape.whole.nbytes(), whole ? kChunk : static_cast<int>(left)});
  }
  // The sum of what the wires say of a chunk, finished.
  __device__ static void add_up(const GpuWarp& warp, const Desk& desk, const Work& work,
                                const Wires& wires, const Finishing& finish, ChunkValues& sum) {
    const auto from = [&](int i) { return wire_of(wires, i) + work.at; };
    add_up_chunk<V>(warp, desk, wires.count, from, work.n, sum);
    finish.all(sum.of);
  }

  __device__ static void encode(const Shape& shape, const float* in, float* residual,
                                uint8_t* wire) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, const Work& work) {
      float* lost = residual ? residual + work.begin : nullptr;
      ChunkValues values;
      load_chunk(warp, desk, in + work.begin, lost, work.n, values);
      encode_chunk<V>(warp, desk, values, work.n, wire + work.at, nullptr, lost);
    });
  }
  __device__ static void decode(const Shape& shape, const uint8_t* wire, float* out) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, const Work& work) {
      decode_chunk<V>(warp, desk, wire + work.at, work.n, out + work.begin);
    });
  }
  __device__ static void add_up(const Shape& shape, const Wires& wires, Finishing finish,
                                float* residual, uint8_t* wire, float* out) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, const Work& work) {
      float* lost = residual ? residual + work.begin : nullptr;
      ChunkValues sum;
      add_up(warp, desk, work, wires, finish, sum);
      if (lost) load_on_top<TopKChunk>(warp, lost, work.n, sum);
      encode_chunk<V>(warp, desk, sum, work.n, wire + work.at, out + work.begin, lost);
    });
  }
  __device__ static void sum(const Shape& shape, const Wires& wires, Finishing finish, float* out) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, const Work& work) {
      ChunkValues sum;
      add_up(warp, desk, work, wires, finish, sum);
      store_chunk(warp, desk, sum, work.n, out + work.begin);
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
