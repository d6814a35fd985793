// Chunks of topk by the 32 lanes of a GPU's warp, their values in registers. Beside what warp.h
// asks of a Warp: sum(x) and most(x) of all lanes, and sync(), after which lanes see what others
// wrote to memory before.
#pragma once

#include "codec/topk.h"
#include "codec/warp.h"

namespace bagua {

// How lanes hold the values of a chunk, as of a block (warp.h).
struct TopKChunk {
  static constexpr int kBlock = static_cast<int>(TopK::kChunk);
};
using ChunkLanes = Lanes<TopKChunk>;
using ChunkValues = Values<TopKChunk>;
constexpr int kChunk = TopKChunk::kBlock;

// What travels of a chunk: so many places, 2 bytes each, and so many bytes that code the values.
struct KeptPart {
  int count, coded_nbytes;
  BAGUA_BOTH int nbytes() const { return 2 * count + coded_nbytes; }
};

// Where a warp works, in memory that its lanes share.
struct Desk {
  static constexpr int kWords = kChunk / 32;
  // So many wires lie there at once, if they are short, all read before one is waited for.
  static constexpr int kMostWires = 4, kForWires = 2048;
  BAGUA_BOTH static constexpr int aligned(int nbytes) { return (nbytes + 15) / 16 * 16; }
  BAGUA_BOTH static int wire_nbytes(const KeptPart& kept) {
    return aligned(2 * kept.count) + aligned(kept.coded_nbytes);
  }
  BAGUA_BOTH static int wires(const KeptPart& kept) {
    return kMostWires * wire_nbytes(kept) <= kForWires ? kMostWires : 1;
  }
  BAGUA_BOTH static int nbytes(const KeptPart& kept) {
    return (4 + 1) * kChunk + 8 * kWords + aligned(4 * kept.count) +
           wires(kept) * wire_nbytes(kept);
  }

  BAGUA_BOTH Desk(char* memory, const KeptPart& kept)
      : kept(kept),
        chunk(reinterpret_cast<float*>(memory)),
        values(chunk + kChunk),
        taken(reinterpret_cast<uint32_t*>(values) + aligned(4 * kept.count) / 4),
        before(taken + kWords),
        wire(reinterpret_cast<uint8_t*>(before + kWords)),
        which(wire + wires(kept) * wire_nbytes(kept)) {}
  BAGUA_BOTH uint8_t* place_bytes(int i) const { return wire + i * wire_nbytes(kept); }
  BAGUA_BOTH uint16_t* places(int i) const { return reinterpret_cast<uint16_t*>(place_bytes(i)); }
  BAGUA_BOTH uint8_t* codes(int i) const { return place_bytes(i) + aligned(2 * kept.count); }
  // Where byte `at` of the i-th wire lies.
  BAGUA_BOTH uint8_t& byte(int i, int at) const {
    return at < 2 * kept.count ? place_bytes(i)[at] : codes(i)[at - 2 * kept.count];
  }

  const KeptPart kept;
  float* chunk;     // of a chunk all values, or those that may be kept, or what is said of the kept
  float* values;    // those that are kept
  uint32_t* taken;  // a bit for each value of the chunk: whether it is kept
  uint32_t* before;  // how many are in words before
  uint8_t* wire;
  uint8_t* which;  // beside `chunk`: which of its lane's values each is that may be kept
};

// Loads n values, and what is added to them, unless that is null. There are zeros past them.
template <class Warp>
BAGUA_BOTH void load_chunk(const Warp& warp, const Desk& desk, const float* x, const float* more,
                           int n, ChunkValues& values) {
  const auto load = [&](int k, float value) { values.of[k] = value; };
  const auto add = [&](int k, float value) { values.of[k] = value + values.of[k]; };
  if (in_rows<TopKChunk>(x, n) && in_rows<TopKChunk>(more, n)) {  // null is aligned
    for_rows<TopKChunk>(warp, x, load);
    if (more) for_rows<TopKChunk>(warp, more, add);
    return;
  }
  for (int i = warp.lane(); i < kChunk; i += kLanes)
    desk.chunk[i] = i >= n ? 0.0f : more ? more[i] + x[i] : x[i];
  warp.sync();
  for_rows<TopKChunk>(warp, desk.chunk, load);
  warp.sync();
}

template <class Warp>
BAGUA_BOTH void store_chunk(const Warp& warp, const Desk& desk, const ChunkValues& values, int n,
                            float* x) {
  if (in_rows<TopKChunk>(x, n)) return store_rows<TopKChunk, true>(warp, values, n, x);
  store_rows<TopKChunk, true>(warp, values, kChunk, desk.chunk);
  warp.sync();
  for (int i = warp.lane(); i < n; i += kLanes) x[i] = desk.chunk[i];
  warp.sync();
}

BAGUA_BOTH int bits_in(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}
// While other lanes set others.
BAGUA_BOTH void set_bits(uint32_t& word, uint32_t bits) {
#ifdef __CUDA_ARCH__
  atomicOr(&word, bits);
#else
  __atomic_fetch_or(&word, bits, __ATOMIC_RELAXED);
#endif
}

// What a chunk's greatest magnitude is, and what at least `kept` reach, and seldom many more: so
// many do of the greatest of those that lanes have side by side.
struct Bounds {
  uint32_t top, likely;
};
template <class Warp>
BAGUA_BOTH Bounds bounds_of(const Warp& warp, const ChunkValues& values, int kept) {
  constexpr int kSides = ChunkLanes::kEach / kSide;
  uint32_t maxima[kSides], top = 0, least = 0xffffffffu;
  BAGUA_UNROLL
  for (int i = 0; i < kSides; ++i) {
    maxima[i] = 0;
    BAGUA_UNROLL
    for (int k = i * kSide; k < (i + 1) * kSide; ++k)
      maxima[i] = greater(maxima[i], magnitude_of(values.of[k]));
    top = greater(top, maxima[i]);
    least = least < maxima[i] ? least : maxima[i];
  }
  top = warp.most(top);
  if (kept > kSides * kLanes * 3 / 4) return {top, 0};
  const auto reach = [&](uint32_t bound) {
    uint32_t count = 0;
    BAGUA_UNROLL
    for (const uint32_t maximum : maxima) count += maximum >= bound ? 1 : 0;
    return static_cast<int>(warp.sum(count));
  };
  return {top, reached(~warp.most(~least), top + 1, kept, kept + kept / 8, reach)};
}

// The values that reach a bound: a column of the desk for each lane's.
struct Candidates {
  const Desk& desk;
  int lane, count;
  BAGUA_BOTH float value(int i) const { return desk.chunk[i * kLanes + lane]; }
  BAGUA_BOTH int place(int i) const {
    return ChunkLanes::place(lane, desk.which[i * kLanes + lane]);
  }
};
template <class Warp>
BAGUA_BOTH Candidates candidates_of(const Warp& warp, const Desk& desk, const ChunkValues& values,
                                    uint32_t bound) {
  int count = 0;
  BAGUA_UNROLL
  for (int k = 0; k < ChunkLanes::kEach; ++k) {
    if (magnitude_of(values.of[k]) < bound) continue;
    desk.chunk[count * kLanes + warp.lane()] = values.of[k];
    desk.which[count * kLanes + warp.lane()] = static_cast<uint8_t>(k);
    ++count;
  }
  return {desk, warp.lane(), count};
}

// What is kept: magnitudes above the least, and those that are just that up to a place.
struct Cut {
  uint32_t least;
  int last;
  BAGUA_BOTH bool takes(const Candidates& candidates, int i) const {
    const uint32_t magnitude = magnitude_of(candidates.value(i));
    return magnitude > least || (magnitude == least && candidates.place(i) <= last);
  }
};
// That of `kept` of the candidates.
template <class Warp>
BAGUA_BOTH Cut cut_of(const Warp& warp, const Candidates& candidates, int kept,
                      const Bounds& bounds) {
  const auto count = [&](auto&& counts) {
    uint32_t mine = 0;
    for (int i = 0; i < candidates.count; ++i) mine += counts(i) ? 1 : 0;
    return static_cast<int>(warp.sum(mine));
  };
  const auto reach = [&](uint32_t x) {
    return count([&](int i) { return magnitude_of(candidates.value(i)) >= x; });
  };
  const uint32_t least = reached(bounds.likely, bounds.top + 1, kept, kept, reach);
  int few = -1, enough = kChunk - 1;  // places up to which less than `kept` are taken, and `kept`
  if (reach(least) == kept) return {least, enough};
  while (few + 1 < enough) {
    const int middle = few + (enough - few) / 2;
    const Cut cut{least, middle};
    (count([&](int i) { return cut.takes(candidates, i); }) < kept ? few : enough) = middle;
  }
  return {least, enough};
}

// Puts what the cut takes on the desk, in the order of places.
template <class Warp>
BAGUA_BOTH void take(const Warp& warp, const Desk& desk, const Candidates& candidates,
                     const Cut& cut) {
  constexpr int kOwn = Desk::kWords / kLanes;
  uint32_t* const own = desk.taken + warp.lane() * kOwn;
  for (int i = 0; i < kOwn; ++i) own[i] = 0;
  warp.sync();
  const auto for_taken = [&](auto&& f) {
    for (int i = 0; i < candidates.count; ++i)
      if (cut.takes(candidates, i)) f(i, candidates.place(i) / 32, candidates.place(i) % 32);
    warp.sync();
  };
  for_taken([&](int, int word, int bit) { set_bits(desk.taken[word], 1u << bit); });
  uint32_t from_here = 0;  // in this lane's words and those of lanes further on
  for (int i = 0; i < kOwn; ++i) from_here += static_cast<uint32_t>(bits_in(own[i]));
  for (int by = 1; by < kLanes; by *= 2) {
    const uint32_t further = warp.down(from_here, by);
    if (warp.lane() + by < kLanes) from_here += further;
  }
  uint32_t before = static_cast<uint32_t>(desk.kept.count) - from_here;
  for (int i = 0; i < kOwn; ++i) {
    desk.before[warp.lane() * kOwn + i] = before;
    before += static_cast<uint32_t>(bits_in(own[i]));
  }
  warp.sync();
  for_taken([&](int i, int word, int bit) {
    const int in_word = bits_in(desk.taken[word] & ((1u << bit) - 1));
    const uint32_t at = desk.before[word] + static_cast<uint32_t>(in_word);
    desk.places(0)[at] = static_cast<uint16_t>(word * 32 + bit);
    desk.values[at] = candidates.value(i);
  });
}

}  // namespace bagua
