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
  // So many wires lie there at once, if they are short, all read before one is waited for. A chunk
  // that is cut needs no more memory than a whole one.
  static constexpr int kMostWires = 4, kForWires = 2048;
  BAGUA_BOTH static constexpr int aligned(int nbytes) { return (nbytes + 15) / 16 * 16; }
  BAGUA_BOTH static int wire_nbytes(const KeptPart& kept) {
    return aligned(2 * kept.count) + aligned(kept.coded_nbytes);
  }
  BAGUA_BOTH static int wires(const KeptPart& kept) {
    const int fit = kForWires / wire_nbytes(kept);
    return fit < 1 ? 1 : fit < kMostWires ? fit : kMostWires;
  }
  BAGUA_BOTH static int wires_nbytes(const KeptPart& kept) {
    const int one = wire_nbytes(kept);
    return one < kForWires ? kForWires : one;
  }
  BAGUA_BOTH static int nbytes(const KeptPart& kept) {
    return (4 + 1) * kChunk + 3 * 4 * kWords + aligned(4 * kept.count) + wires_nbytes(kept);
  }

  BAGUA_BOTH Desk(char* memory, const KeptPart& kept)
      : kept(kept),
        chunk(reinterpret_cast<float*>(memory)),
        values(chunk + kChunk),
        above(reinterpret_cast<uint32_t*>(values) + aligned(4 * kept.count) / 4),
        equal(above + kWords),
        before(equal + kWords),
        wire(reinterpret_cast<uint8_t*>(before + kWords)),
        which(wire + wires_nbytes(kept)) {}
  BAGUA_BOTH uint8_t* place_bytes(int i) const { return wire + i * wire_nbytes(kept); }
  BAGUA_BOTH uint16_t* places(int i) const { return reinterpret_cast<uint16_t*>(place_bytes(i)); }
  BAGUA_BOTH uint8_t* codes(int i) const { return place_bytes(i) + aligned(2 * kept.count); }
  // Where byte `at` of the i-th wire lies.
  BAGUA_BOTH uint8_t& byte(int i, int at) const {
    return at < 2 * kept.count ? place_bytes(i)[at] : codes(i)[at - 2 * kept.count];
  }

  const KeptPart kept;
  float* chunk;   // of a chunk all values, or those that may be kept, or what is said of the kept
  float* values;  // those that are kept, or what a wire says of them
  // A bit for each value of the chunk, whether it is larger than the least that is kept, or as
  // large; and how many of both there are in words before.
  uint32_t *above, *equal, *before;
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

// The greatest magnitude of a chunk, and one that at least `kept` values reach, and seldom many
// more: so many do of the greatest of each four side by side.
struct Bounds {
  uint32_t top, likely;
};
template <class Warp>
BAGUA_BOTH Bounds bounds_of(const Warp& warp, const ChunkValues& values, int kept) {
  constexpr int kSides = ChunkLanes::kEach / kSideBySide;
  uint32_t maxima[kSides], top = 0, least = 0xffffffffu;
  BAGUA_UNROLL
  for (int i = 0; i < kSides; ++i) {
    maxima[i] = 0;
    BAGUA_UNROLL
    for (int k = i * kSideBySide; k < (i + 1) * kSideBySide; ++k)
      maxima[i] = greater(maxima[i], TopK::magnitude(values.of[k]));
    top = greater(top, maxima[i]);
    least = lesser(least, maxima[i]);
  }
  top = warp.most(top);
  if (kept > kSides * kLanes * 3 / 4) return {top, 0};
  const auto reach = [&](uint32_t bound) {
    uint32_t count = 0;
    BAGUA_UNROLL
    for (const uint32_t maximum : maxima) count += maximum >= bound ? 1 : 0;
    return static_cast<int>(warp.sum(count));
  };
  const uint32_t least_of_all = ~warp.most(~least);
  return {top, reached(least_of_all, top + 1, kept, kept + kept / 8, reach)};
}

// The values that reach a bound: a column of the desk for each lane's.
struct Candidates {
  const Desk& desk;
  int lane, count;
  BAGUA_BOTH float value(int i) const { return desk.chunk[i * kLanes + lane]; }
  BAGUA_BOTH uint32_t magnitude(int i) const { return TopK::magnitude(value(i)); }
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
    if (TopK::magnitude(values.of[k]) < bound) continue;
    desk.chunk[count * kLanes + warp.lane()] = values.of[k];
    desk.which[count * kLanes + warp.lane()] = static_cast<uint8_t>(k);
    ++count;
  }
  return {desk, warp.lane(), count};
}

// The least of what is kept of them.
template <class Warp>
BAGUA_BOTH uint32_t least_kept(const Warp& warp, const Candidates& candidates, int kept,
                               const Bounds& bounds) {
  return reached(bounds.likely, bounds.top + 1, kept, kept, [&](uint32_t x) {
    uint32_t count = 0;
    for (int i = 0; i < candidates.count; ++i) count += candidates.magnitude(i) >= x ? 1 : 0;
    return static_cast<int>(warp.sum(count));
  });
}

// How many values are above the least and how many equal to it, in one word.
struct Counts {
  uint32_t above, equal;
  BAGUA_BOTH explicit Counts(uint32_t word) : above(word & 0xffffu), equal(word >> 16) {}
  BAGUA_BOTH static uint32_t word(uint32_t above, uint32_t equal) {
    return static_cast<uint32_t>(bits_in(above) | bits_in(equal) << 16);
  }
};

// Tells on the desk which candidates are above the least and which are equal to it, and how many of
// both come before those of each word. Returns how many there are.
template <class Warp>
BAGUA_BOTH Counts mark(const Warp& warp, const Candidates& candidates, uint32_t least) {
  constexpr int kOwn = Desk::kWords / kLanes;
  const Desk& desk = candidates.desk;
  const int own = warp.lane() * kOwn;
  for (int i = own; i < own + kOwn; ++i) desk.above[i] = desk.equal[i] = 0;
  warp.sync();
  for (int i = 0; i < candidates.count; ++i) {
    const uint32_t magnitude = candidates.magnitude(i);
    const int place = candidates.place(i);
    if (magnitude >= least)
      set_bits((magnitude > least ? desk.above : desk.equal)[place / 32], 1u << place % 32);
  }
  warp.sync();
  uint32_t from_here = 0;  // in this lane's words and those of lanes further on
  for (int i = own; i < own + kOwn; ++i) from_here += Counts::word(desk.above[i], desk.equal[i]);
  for (int by = 1; by < kLanes; by *= 2) {
    const uint32_t further = warp.down(from_here, by);
    if (warp.lane() + by < kLanes) from_here += further;
  }
  const uint32_t all = warp.first(from_here);
  uint32_t before = all - from_here;
  for (int i = own; i < own + kOwn; ++i) {
    desk.before[i] = before;
    before += Counts::word(desk.above[i], desk.equal[i]);
  }
  warp.sync();
  return Counts(all);
}

// Puts on the desk what is kept, in the order of places: of equal ones the first.
template <class Warp>
BAGUA_BOTH void take(const Warp& warp, const Candidates& candidates, uint32_t least) {
  const Desk& desk = candidates.desk;
  const Counts all = mark(warp, candidates, least);
  const uint32_t equals = static_cast<uint32_t>(desk.kept.count) - all.above;
  for (int i = 0; i < candidates.count; ++i) {
    const uint32_t magnitude = candidates.magnitude(i);
    if (magnitude < least) continue;
    const int place = candidates.place(i), word = place / 32;
    const uint32_t earlier = (1u << place % 32) - 1;
    const Counts in_word(Counts::word(desk.above[word] & earlier, desk.equal[word] & earlier));
    const Counts before(desk.before[word]);
    const uint32_t equal = before.equal + in_word.equal;
    if (magnitude == least && equal >= equals) continue;
    const uint32_t at = before.above + in_word.above + lesser(equal, equals);
    desk.places(0)[at] = static_cast<uint16_t>(place);
    desk.values[at] = candidates.value(i);
  }
  warp.sync();
}

}  // namespace bagua
