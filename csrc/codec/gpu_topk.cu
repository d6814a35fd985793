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
    int kept, last_kept;
    int coded_nbytes, last_coded_nbytes;
  };
  static constexpr int kThreads = kLanes, kAtOnce = 1;
  static Shape shape(const Coding& coding, int64_t count) {
    const int64_t rest = count % Desk::kChunk;
    const auto kept = [&](int64_t n) { return static_cast<int>(TopK::kept_of(coding, n)); };
    const auto coded = [&](int64_t n) {
      return static_cast<int>(coding.values->wire_nbytes(coding, kept(n)));
    };
    return {count, kept(Desk::kChunk), kept(rest), coded(Desk::kChunk), coded(rest)};
  }
  static int64_t blocks(int64_t count) { return (count + Desk::kChunk - 1) / Desk::kChunk; }
  static int shared_nbytes(const Shape& shape) {
    return Desk::nbytes(shape.kept, shape.coded_nbytes);
  }

  // One of the chunks: where its values and its wire begin, how many they are, how many are kept,
  // and bytes of their codes.
  struct Chunk {
    int64_t begin, at;
    int n, kept, coded_nbytes;
  };
  template <class F>
  __device__ static void visit(const Shape& shape, F&& f) {
    extern __shared__ __align__(16) char memory[];
    const Desk desk(memory, shape.kept, shape.coded_nbytes);
    const int64_t i = blockIdx.x, wire_nbytes = 2 * shape.kept + shape.coded_nbytes;
    const int64_t begin = i * Desk::kChunk, left = shape.count - begin, at = i * wire_nbytes;
    if (left >= Desk::kChunk) {
      f(GpuWarp(), desk, Chunk{begin, at, Desk::kChunk, shape.kept, shape.coded_nbytes});
    } else {
      f(GpuWarp(), desk,
        Chunk{begin, at, static_cast<int>(left), shape.last_kept, shape.last_coded_nbytes});
    }
  }
  // Makes value i of the chunk f(i).
  template <class F>
  __device__ static void fill(const GpuWarp& warp, const Desk& desk, int n, F&& f) {
    for (int i = warp.lane(); i < n; i += kLanes) desk.chunk[i] = f(i);
    warp.sync();
  }

  // Makes the chunk what the wires say of it, in order.
  __device__ static void add_all(const GpuWarp& warp, const Desk& desk, const Chunk& c,
                                 const Wires& wires) {
    fill(warp, desk, c.n, [](int) { return 0.0f; });
    for (int k = 0; k < wires.count; ++k)
      add_chunk<V, true>(warp, desk, c.n, c.kept, c.coded_nbytes, wire_of(wires, k) + c.at);
  }

  __device__ static void encode(const Shape& shape, const float* in, float* residual,
                                uint8_t* wire) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, const Chunk& c) {
      float* lost = residual ? residual + c.begin : nullptr;
      fill(warp, desk, c.n,
           [&](int i) { return lost ? lost[i] + in[c.begin + i] : in[c.begin + i]; });
      encode_chunk<V>(warp, desk, c.n, c.kept, c.coded_nbytes, wire + c.at, nullptr, lost);
    });
  }
  __device__ static void decode(const Shape& shape, const uint8_t* wire, float* out) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, const Chunk& c) {
      fill(warp, desk, c.n, [](int) { return 0.0f; });
      add_chunk<V, false>(warp, desk, c.n, c.kept, c.coded_nbytes, wire + c.at);
      for (int i = warp.lane(); i < c.n; i += kLanes) out[c.begin + i] = desk.chunk[i];
      warp.sync();
    });
  }
  __device__ static void add_up(const Shape& shape, const Wires& wires, Finishing finish,
                                float* residual, uint8_t* wire, float* out) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, const Chunk& c) {
      float* lost = residual ? residual + c.begin : nullptr;
      add_all(warp, desk, c, wires);
      fill(warp, desk, c.n, [&](int i) {
        const float sum = finish(desk.chunk[i]);
        return lost ? sum + lost[i] : sum;
      });
      encode_chunk<V>(warp, desk, c.n, c.kept, c.coded_nbytes, wire + c.at, out + c.begin, lost);
    });
  }
  __device__ static void sum(const Shape& shape, const Wires& wires, Finishing finish, float* out) {
    visit(shape, [&](const GpuWarp& warp, const Desk& desk, const Chunk& c) {
      add_all(warp, desk, c, wires);
      for (int i = warp.lane(); i < c.n; i += kLanes) out[c.begin + i] = finish(desk.chunk[i]);
      warp.sync();
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
