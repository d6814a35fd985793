// Chunks of topk by the 32 lanes of a GPU's warp.
#pragma once

#include "codec/warp_select.h"

namespace bagua {

// How the kept values are coded: by a format of blocks, ...
template <class C>
struct KeptBlocks {
  static constexpr int64_t kWhole = block_nbytes<C>(C::kBlock);
  template <class Warp>
  BAGUA_BOTH static void encode(const Warp& warp, const float* values, int count, uint8_t* codes) {
    for (int begin = 0; begin < count; begin += C::kBlock, codes += kWhole) {
      const int n = count - begin < C::kBlock ? count - begin : C::kBlock;
      Values<C> block = {};
      load<C>(warp, values + begin, n, block);
      encode_block<C>(warp, block, n, codes, nullptr, nullptr);
    }
  }
  template <class Warp>
  BAGUA_BOTH static void decode(const Warp& warp, const uint8_t* codes, int count, float* values) {
    for (int begin = 0; begin < count; begin += C::kBlock, codes += kWhole) {
      const int n = count - begin < C::kBlock ? count - begin : C::kBlock;
      Values<C> block = {};
      decode_block<C, false>(warp, codes, n, block);
      store<C>(warp, block, n, values + begin);
    }
  }
};

// ... or one by one.
template <class S>
struct KeptSingles {
  template <class Warp>
  BAGUA_BOTH static void encode(const Warp& warp, const float* values, int count, uint8_t* codes) {
    auto* to = reinterpret_cast<typename S::Wire*>(codes);
    for (int i = warp.lane(); i < count; i += kLanes) to[i] = S::code(values[i]);
  }
  template <class Warp>
  BAGUA_BOTH static void decode(const Warp& warp, const uint8_t* codes, int count, float* values) {
    auto* from = reinterpret_cast<const typename S::Wire*>(codes);
    for (int i = warp.lane(); i < count; i += kLanes) values[i] = S::value(from[i]);
  }
};

// Encodes n values, with zeros past them, to a wire, which may lie anywhere. `said` and `rest` as
// in warp.h.
template <class V, class Warp>
BAGUA_BOTH void encode_chunk(const Warp& warp, const Desk& desk, ChunkValues& values, int n,
                             uint8_t* wire, float* said, float* rest) {
  const KeptPart kept = desk.kept;
  const Bounds bounds = bounds_of(warp, values, kept.count);
  const Candidates candidates = candidates_of(warp, desk, values, bounds.likely);
  take(warp, candidates, least_kept(warp, candidates, kept.count, bounds));
  V::encode(warp, desk.values, kept.count, desk.codes(0));
  if (rest) {
    if (!is_finite(bits_float(bounds.top))) {
      BAGUA_UNROLL
      for (float& value : values.of) value = finite_or_zero(value);
    }
    store_chunk(warp, desk, values, n, rest);
  }
  if (said) store_chunk(warp, desk, ChunkValues{}, n, said);
  warp.sync();
  for (int i = warp.lane(); i < kept.nbytes(); i += kLanes) wire[i] = desk.byte(0, i);
  if (said || rest) {  // where something is kept, that is put right
    V::decode(warp, desk.codes(0), kept.count, desk.chunk);
    warp.sync();
    for (int i = warp.lane(); i < kept.count; i += kLanes) {
      const int place = desk.places(0)[i];
      if (said) said[place] = desk.chunk[i];
      if (rest) rest[place] = finite_or_zero(desk.values[i] - desk.chunk[i]);
    }
  }
  warp.sync();
}

// Reads some wires of a chunk, as many as the desk has room for, where from(i) is one of them.
template <class Warp, class From>
BAGUA_BOTH void read_wires(const Warp& warp, const Desk& desk, int count, From&& from) {
  const int nbytes = desk.kept.nbytes();
  if (count == 1) {  // the compiler loads several of its bytes at once
    const uint8_t* wire = from(0);
    for (int at = warp.lane(); at < nbytes; at += kLanes) desk.byte(0, at) = wire[at];
    return warp.sync();
  }
  for (int at = warp.lane(); at < nbytes; at += kLanes) {
    uint8_t bytes[Desk::kMostWires] = {};
    BAGUA_UNROLL
    for (int i = 0; i < Desk::kMostWires; ++i)
      if (i < count) bytes[i] = from(i)[at];
    BAGUA_UNROLL
    for (int i = 0; i < Desk::kMostWires; ++i)
      if (i < count) desk.byte(i, at) = bytes[i];
  }
  warp.sync();
}

// Adds what the i-th of these says to n values, or puts it there. It is not trusted to stay inside.
template <class V, bool Adds, class Warp>
BAGUA_BOTH void tell_wire(const Warp& warp, const Desk& desk, int i, int n, float* x) {
  V::decode(warp, desk.codes(i), desk.kept.count, desk.values);
  warp.sync();
  for (int k = warp.lane(); k < desk.kept.count; k += kLanes) {
    const int place = desk.places(i)[k];
    if (place < n) x[place] = Adds ? x[place] + desk.values[k] : desk.values[k];
  }
  warp.sync();
}

// What a wire says of n values.
template <class V, class Warp>
BAGUA_BOTH void decode_chunk(const Warp& warp, const Desk& desk, const uint8_t* wire, int n,
                             float* out) {
  store_chunk(warp, desk, ChunkValues{}, n, out);
  read_wires(warp, desk, 1, [&](int) { return wire; });
  tell_wire<V, false>(warp, desk, 0, n, out);
}

// Adds up what wires say of n values, in order, where from(i) is one of them.
template <class V, class Warp, class From>
BAGUA_BOTH void add_up_chunk(const Warp& warp, const Desk& desk, int wires, From&& from, int n,
                             ChunkValues& sum) {
  store_rows<TopKChunk, true>(warp, ChunkValues{}, kChunk, desk.chunk);
  const int most = Desk::wires(desk.kept);
  for (int begin = 0; begin < wires; begin += most) {
    const int count = wires - begin < most ? wires - begin : most;
    read_wires(warp, desk, count, [&](int i) { return from(begin + i); });
    for (int i = 0; i < count; ++i) tell_wire<V, true>(warp, desk, i, n, desk.chunk);
  }
  for_rows<TopKChunk>(warp, desk.chunk, [&](int k, float value) { sum.of[k] = value; });
  warp.sync();
}

}  // namespace bagua
