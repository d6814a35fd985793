#include "codec/gpu.h"

#include <algorithm>
#include <string>

#include "codec/fp8_e4m3.h"
#include "codec/minmax_u4.h"
#include "codec/minmax_u8.h"
#include "codec/sign1.h"
#include "codec/warp.h"
#include "codec/warp_topk.h"
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
  __device__ void sync() const { __syncwarp(); }
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
    const int64_t left = count - begin;
    if (left >= C::kBlock) {  // the compiler makes the most of a known size
      f(GpuWarp(), begin, C::kBlock, block * kWhole<C>);
    } else {
      f(GpuWarp(), begin, static_cast<int>(left), block * kWhole<C>);
    }
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
#pragma unroll 4  // of several the codes are loaded before the first is used
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

// ---- topk: a warp to a chunk
// ---------------------------------------------------------------------

// What a chunk is made of: the whole ones are alike, the last may be shorter.
struct Chunks {
  int64_t count;
  int kept, last_kept;
  int coded_nbytes, last_coded_nbytes;
};

// Calls f(warp, desk, values' begin, how many, how many are kept, bytes of their codes, wire's
// begin) for each chunk.
template <class F>
__device__ void for_chunks(const Chunks& chunks, F&& f) {
  extern __shared__ __align__(16) char memory[];
  const Desk desk(memory, chunks.kept, chunks.coded_nbytes);
  const int64_t number = (chunks.count + Desk::kChunk - 1) / Desk::kChunk;
  const int64_t wire_nbytes = 2 * chunks.kept + chunks.coded_nbytes;
  for (int64_t chunk = blockIdx.x; chunk < number; chunk += gridDim.x) {
    const int64_t begin = chunk * Desk::kChunk, left = chunks.count - begin;
    const bool whole = left >= Desk::kChunk;
    f(GpuWarp(), desk, begin, whole ? Desk::kChunk : static_cast<int>(left),
      whole ? chunks.kept : chunks.last_kept,
      whole ? chunks.coded_nbytes : chunks.last_coded_nbytes, chunk * wire_nbytes);
  }
}

template <class V>
__global__ void __launch_bounds__(kLanes)
    encode_chunks(const float* in, float* residual, Chunks chunks, uint8_t* wire) {
  for_chunks(chunks, [&](const GpuWarp& warp, const Desk& desk, int64_t begin, int n, int kept,
                         int coded_nbytes, int64_t at) {
    for (int i = warp.lane(); i < n; i += kLanes)
      desk.chunk[i] = residual ? residual[begin + i] + in[begin + i] : in[begin + i];
    warp.sync();
    encode_chunk<V>(warp, desk, n, kept, coded_nbytes, wire + at, nullptr,
                    residual ? residual + begin : nullptr);
  });
}

template <class V>
__global__ void __launch_bounds__(kLanes)
    decode_chunks(const uint8_t* wire, Chunks chunks, float* out) {
  for_chunks(chunks, [&](const GpuWarp& warp, const Desk& desk, int64_t begin, int n, int kept,
                         int coded_nbytes, int64_t at) {
    for (int i = warp.lane(); i < n; i += kLanes) desk.chunk[i] = 0;
    warp.sync();
    add_chunk<V, false>(warp, desk, n, kept, coded_nbytes, wire + at);
    for (int i = warp.lane(); i < n; i += kLanes) out[begin + i] = desk.chunk[i];
    warp.sync();
  });
}

template <class V>
__global__ void __launch_bounds__(kLanes)
    add_up_chunks(Wires wires, float divisor, float factor, float* residual, Chunks chunks,
                  uint8_t* wire, float* out) {
  for_chunks(chunks, [&](const GpuWarp& warp, const Desk& desk, int64_t begin, int n, int kept,
                         int coded_nbytes, int64_t at) {
    for (int i = warp.lane(); i < n; i += kLanes) desk.chunk[i] = 0;
    warp.sync();
    for (int k = 0; k < wires.count; ++k)
      add_chunk<V, true>(warp, desk, n, kept, coded_nbytes,
                         reinterpret_cast<const uint8_t*>(wires.of[k]) + at);
    for (int i = warp.lane(); i < n; i += kLanes) {
      float& sum = desk.chunk[i];
      if (divisor != 1 || factor != 1) sum = finished(sum, divisor, factor);
      if (residual) sum += residual[begin + i];
    }
    warp.sync();
    encode_chunk<V>(warp, desk, n, kept, coded_nbytes, wire + at, out + begin,
                    residual ? residual + begin : nullptr);
  });
}

// ---- the table ----------------------------------------------------------------------------------

int blocks_for(int64_t items, int per_block) {
  return static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>((items + per_block - 1) / per_block, kMostBlocks)));
}

void check_place(const char* wire) {
  if (reinterpret_cast<uintptr_t>(wire) % 4 != 0)
    throw UsageError("on a GPU a wire begins at a multiple of 4 bytes");
}

template <class F>
void launch(Device& device, const char* wire, F&& kernel) {
  check_place(wire);
  device.as_current([&] {
    kernel();
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess)
      throw InternalError(std::string("a codec's kernel: ") + cudaGetErrorString(status));
  });
}

template <class C>
struct OfBlocks {
  static int grid(int64_t count) {
    return blocks_for((count + C::kBlock - 1) / C::kBlock, kThreads / kLanes);
  }
  static void encode(const Coding&, const float* in, float* residual, int64_t count, char* wire,
                     cudaStream_t s) {
    encode_kernel<C>
        <<<grid(count), kThreads, 0, s>>>(in, residual, count, reinterpret_cast<uint8_t*>(wire));
  }
  static void decode(const Coding&, const char* wire, int64_t count, float* out, cudaStream_t s) {
    decode_kernel<C>
        <<<grid(count), kThreads, 0, s>>>(reinterpret_cast<const uint8_t*>(wire), count, out);
  }
  static void add_up(const Coding&, const Wires& wires, Finish f, float* residual, int64_t count,
                     char* wire, float* out, cudaStream_t s) {
    add_up_kernel<C><<<grid(count), kThreads, 0, s>>>(wires, static_cast<float>(f.divisor),
                                                      static_cast<float>(f.factor), residual, count,
                                                      reinterpret_cast<uint8_t*>(wire), out);
  }
};

template <class S>
struct OfSingles {
  using Wire = typename S::Wire;
  static int grid(int64_t count) { return blocks_for(count, kThreads); }
  static void encode(const Coding&, const float* in, float* residual, int64_t count, char* wire,
                     cudaStream_t s) {
    encode_single<S>
        <<<grid(count), kThreads, 0, s>>>(in, residual, count, reinterpret_cast<Wire*>(wire));
  }
  static void decode(const Coding&, const char* wire, int64_t count, float* out, cudaStream_t s) {
    decode_single<S>
        <<<grid(count), kThreads, 0, s>>>(reinterpret_cast<const Wire*>(wire), count, out);
  }
  static void add_up(const Coding&, const Wires& wires, Finish f, float* residual, int64_t count,
                     char* wire, float* out, cudaStream_t s) {
    add_up_single<S><<<grid(count), kThreads, 0, s>>>(wires, static_cast<float>(f.divisor),
                                                      static_cast<float>(f.factor), residual, count,
                                                      reinterpret_cast<Wire*>(wire), out);
  }
};

template <class V>
struct OfChunks {
  static int grid(int64_t count) { return blocks_for(count, Desk::kChunk); }
  static Chunks chunks_of(const Coding& coding, int64_t count) {
    const int64_t rest = count % Desk::kChunk;
    const auto kept = [&](int64_t n) { return static_cast<int>(TopK::kept_of(coding, n)); };
    const auto coded = [&](int64_t n) {
      return static_cast<int>(coding.values->wire_nbytes(coding, kept(n)));
    };
    return {count, kept(Desk::kChunk), kept(rest), coded(Desk::kChunk), coded(rest)};
  }
  // What a block of threads has to share; more than the usual needs to be asked for.
  template <class Kernel>
  static size_t desk(Kernel* kernel, const Chunks& chunks) {
    const size_t nbytes = Desk::nbytes(chunks.kept, chunks.coded_nbytes);
    if (nbytes > 48 << 10)
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(nbytes));
    return nbytes;
  }
  static void encode(const Coding& coding, const float* in, float* residual, int64_t count,
                     char* wire, cudaStream_t s) {
    const Chunks chunks = chunks_of(coding, count);
    encode_chunks<V><<<grid(count), kLanes, desk(encode_chunks<V>, chunks), s>>>(
        in, residual, chunks, reinterpret_cast<uint8_t*>(wire));
  }
  static void decode(const Coding& coding, const char* wire, int64_t count, float* out,
                     cudaStream_t s) {
    const Chunks chunks = chunks_of(coding, count);
    decode_chunks<V><<<grid(count), kLanes, desk(decode_chunks<V>, chunks), s>>>(
        reinterpret_cast<const uint8_t*>(wire), chunks, out);
  }
  static void add_up(const Coding& coding, const Wires& wires, Finish f, float* residual,
                     int64_t count, char* wire, float* out, cudaStream_t s) {
    const Chunks chunks = chunks_of(coding, count);
    add_up_chunks<V><<<grid(count), kLanes, desk(add_up_chunks<V>, chunks), s>>>(
        wires, static_cast<float>(f.divisor), static_cast<float>(f.factor), residual, chunks,
        reinterpret_cast<uint8_t*>(wire), out);
  }
};

struct Row {
  const char* name;  // topk's has that of its values' codec behind it
  void (*encode)(const Coding&, const float*, float*, int64_t, char*, cudaStream_t);
  void (*decode)(const Coding&, const char*, int64_t, float*, cudaStream_t);
  void (*add_up)(const Coding&, const Wires&, Finish, float*, int64_t, char*, float*, cudaStream_t);
};
template <class T>
constexpr Row row(const char* name) {
  return {name, T::encode, T::decode, T::add_up};
}

const Row& row_of(const Coding& coding) {
  static constexpr Row rows[] = {
      row<OfSingles<Float>>("raw"),
      row<OfSingles<Half>>("fp16"),
      row<OfSingles<BrainHalf>>("bf16"),
      row<OfBlocks<MinMaxU8>>("minmax_u8"),
      row<OfBlocks<MinMaxU4>>("minmax_u4"),
      row<OfBlocks<Fp8E4M3>>("fp8_e4m3"),
      row<OfBlocks<Sign1>>("sign1"),
      row<OfChunks<KeptSingles<Float>>>("topk raw"),
      row<OfChunks<KeptSingles<Half>>>("topk fp16"),
      row<OfChunks<KeptSingles<BrainHalf>>>("topk bf16"),
      row<OfChunks<KeptBlocks<MinMaxU8>>>("topk minmax_u8"),
      row<OfChunks<KeptBlocks<MinMaxU4>>>("topk minmax_u4"),
      row<OfChunks<KeptBlocks<Fp8E4M3>>>("topk fp8_e4m3"),
  };
  std::string name = coding.codec->name;
  if (coding.codec->sparse) name += std::string(" ") + coding.values->name;
  for (const Row& row : rows)
    if (row.name == name) return row;
  throw InternalError(std::string(coding.codec->name) + " has no kernels");
}

}  // namespace

void gpu_encode(const Coding& coding, const float* in, float* residual, int64_t count, char* wire,
                Device& device, Device::Stream stream) {
  if (count == 0) return;
  launch(device, wire, [&] {
    row_of(coding).encode(coding, in, residual, count, wire, static_cast<cudaStream_t>(stream));
  });
}

void gpu_decode(const Coding& coding, const char* wire, int64_t count, float* out, Device& device,
                Device::Stream stream) {
  if (count == 0) return;
  launch(device, wire, [&] {
    row_of(coding).decode(coding, wire, count, out, static_cast<cudaStream_t>(stream));
  });
}

void gpu_add_up(const Coding& coding, const char* const* wires, int nwires, Finish finish,
                float* residual, int64_t count, char* wire, float* out, Device& device,
                Device::Stream stream) {
  if (count == 0) return;
  if (nwires > kMostWires) throw InternalError("at most 64 wires are added up at once");
  Wires all = {{}, nwires};
  std::copy_n(wires, nwires, all.of);
  for (int i = 0; i < nwires; ++i) check_place(wires[i]);
  launch(device, wire, [&] {
    row_of(coding).add_up(coding, all, finish, residual, count, wire, out,
                          static_cast<cudaStream_t>(stream));
  });
}

}  // namespace bagua
