// Chunks of topk by the 32 lanes of a GPU's warp, in memory that they share. Beside what warp.h
// asks of a Warp: sync(), after which lanes see what others wrote before.
#pragma once

#include "codec/topk.h"
#include "codec/warp.h"

namespace bagua {

// Where a warp works: values of a chunk, those that are kept with their places, and their codes.
struct Desk {
  static constexpr int kChunk = static_cast<int>(TopK::kChunk);
  static constexpr int aligned(int nbytes) { return (nbytes + 15) / 16 * 16; }
  // Bytes for chunks of which so many values are kept, whose codes are so many bytes.
  static constexpr int nbytes(int kept, int coded_nbytes) {
    return 4 * kChunk + aligned(coded_nbytes) + aligned(2 * kept) + 4 * kept;
  }
  BAGUA_BOTH Desk(char* memory, int kept, int coded_nbytes)
      : chunk(reinterpret_cast<float*>(memory)),
        codes(reinterpret_cast<uint8_t*>(chunk + kChunk)),
        places(reinterpret_cast<uint16_t*>(codes + aligned(coded_nbytes))),
        values(reinterpret_cast<float*>(places + aligned(2 * kept) / 2)) {}
  float* chunk;
  uint8_t* codes;
  uint16_t* places;
  float* values;
};

template <class Warp>
BAGUA_BOTH uint32_t total(const Warp& warp, uint32_t x) {
  for (int half = kLanes / 2; half > 0; half /= 2) x += warp.down(x, half);
  return warp.first(x);
}

BAGUA_BOTH uint32_t magnitude_of(float x) { return float_bits(x) & 0x7fffffffu; }
BAGUA_BOTH int bits_in(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

template <class Warp>
BAGUA_BOTH int count_from(const Warp& warp, const float* chunk, int n, uint32_t least) {
  uint32_t count = 0;
  for (int i = warp.lane(); i < n; i += kLanes) count += magnitude_of(chunk[i]) >= least ? 1 : 0;
  return static_cast<int>(total(warp, count));
}

// Finds the `kept` largest magnitudes of the n values in the chunk, of equal ones the first.
template <class Warp>
BAGUA_BOTH void select(const Warp& warp, const Desk& desk, int n, int kept) {
  uint32_t least = 0;  // the greatest that `kept` of them reach
  for (uint32_t bit = 1u << 30; bit > 0; bit >>= 1)
    if (count_from(warp, desk.chunk, n, least | bit) >= kept) least |= bit;
  int equals = kept - count_from(warp, desk.chunk, n, least + 1);  // of those so many are taken
  int at = 0;
  for (int begin = 0; begin < n; begin += kLanes) {
    const int i = begin + warp.lane();
    const uint32_t magnitude = i < n ? magnitude_of(desk.chunk[i]) : 0;
    const uint32_t before = (1u << warp.lane()) - 1;
    const uint32_t equal = warp.vote(i < n && magnitude == least);
    const bool first = magnitude == least && bits_in(equal & before) < equals;
    const bool takes = i < n && (magnitude > least || first);
    const uint32_t taken = warp.vote(takes);
    if (takes) {
      const int place = at + bits_in(taken & before);
      desk.places[place] = static_cast<uint16_t>(i);
      desk.values[place] = desk.chunk[i];
    }
    at += bits_in(taken);
    equals -= bits_in(equal);
  }
  warp.sync();
}

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

// Encodes the n values in the chunk to a wire, which may lie anywhere. `said` and `rest`
// as in warp.h.
template <class V, class Warp>
BAGUA_BOTH void encode_chunk(const Warp& warp, const Desk& desk, int n, int kept, int coded_nbytes,
                             uint8_t* wire, float* said, float* rest) {
  select(warp, desk, n, kept);
  V::encode(warp, desk.values, kept, desk.codes);
  warp.sync();
  for (int i = warp.lane(); i < kept; i += kLanes) {
    wire[2 * i] = static_cast<uint8_t>(desk.places[i]);
    wire[2 * i + 1] = static_cast<uint8_t>(desk.places[i] >> 8);
  }
  for (int i = warp.lane(); i < coded_nbytes; i += kLanes) wire[2 * kept + i] = desk.codes[i];
  if (!said && !rest) return warp.sync();
  V::decode(warp, desk.codes, kept, desk.values);
  warp.sync();
  if (said) {
    for (int i = warp.lane(); i < n; i += kLanes) said[i] = 0;
    warp.sync();
    for (int i = warp.lane(); i < kept; i += kLanes) said[desk.places[i]] = desk.values[i];
  }
  if (rest) {
    bool finite = true;
    for (int i = warp.lane(); i < kept; i += kLanes) {
      float& left = desk.chunk[desk.places[i]];
      left = finite_or_zero(left - desk.values[i]);
      finite = finite && is_finite(desk.values[i]);
    }
    // Of what is no number some is among the kept: NaNs and Infs are larger than everything.
    const bool all_finite = warp.vote(!finite) == 0;
    warp.sync();
    for (int i = warp.lane(); i < n; i += kLanes)
      rest[i] = all_finite ? desk.chunk[i] : finite_or_zero(desk.chunk[i]);
  }
  warp.sync();
}

// Adds what the wire says to the n values in the chunk, or puts it there. It is not trusted to stay
// inside.
template <class V, bool Adds, class Warp>
BAGUA_BOTH void add_chunk(const Warp& warp, const Desk& desk, int n, int kept, int coded_nbytes,
                          const uint8_t* wire) {
  for (int i = warp.lane(); i < coded_nbytes; i += kLanes) desk.codes[i] = wire[2 * kept + i];
  warp.sync();
  V::decode(warp, desk.codes, kept, desk.values);
  warp.sync();
  for (int i = warp.lane(); i < kept; i += kLanes) {
    const int place = wire[2 * i] | wire[2 * i + 1] << 8;
    if (place < n) desk.chunk[place] = Adds ? desk.chunk[place] + desk.values[i] : desk.values[i];
  }
  warp.sync();
}

}  // namespace bagua
