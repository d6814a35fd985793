#include "codec/topk.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "codec/blocks.h"
#include "codec/format.h"

namespace bagua {
namespace {

// How the `kept` largest magnitudes of a chunk are found.
//   1. A bound that at least `kept` of them reach. The chunk is dealt to groups, value i to group
//      i % groups, and each has a greatest magnitude. A bound that `kept` of these reach, as many
//      values reach at least. There are a third more groups than that, so that seldom a group has
//      several values beyond the bound, and an eighth too many will do, which ends the search soon.
//   2. The candidates: what reaches the bound is taken out of the chunk.
//   3. The greatest number that `kept` of them reach, between the bound and their greatest.

constexpr int kChunk = static_cast<int>(TopK::kChunk);

// Magnitudes are counted in vectors of so many: behind the last one as many follow that are -1.
constexpr int kVector = 32;

// Powers of two.
constexpr int kFewestGroups = 64, kMostGroups = 1024;

// Candidates of 64 values that are taken without a look how many there are.
constexpr int kAtOnce = 4;

[[gnu::always_inline]] inline int32_t magnitude(float x) {
  return static_cast<int32_t>(TopK::magnitude(x));
}

[[gnu::always_inline]] inline int count_from(const int32_t* magnitudes, int n, int32_t least) {
  int32_t reach[kVector] = {};
  for (int i = 0; i < n; i += kVector)
    for (int j = 0; j < kVector; ++j) reach[j] += magnitudes[i + j] >= least ? 1 : 0;
  return std::accumulate(reach, reach + kVector, 0);
}

// What `reached` says of these magnitudes, from `low` on.
[[gnu::always_inline]] inline int32_t reached_by(const int32_t* magnitudes, int n, int kept,
                                                 int few, int32_t low) {
  int32_t most = 0;
  for (int i = 0; i < n; ++i) most = std::max(most, magnitudes[i]);
  const auto count = [&](uint32_t x) { return count_from(magnitudes, n, static_cast<int32_t>(x)); };
  const auto beyond = static_cast<uint32_t>(most) + 1;
  return static_cast<int32_t>(reached(static_cast<uint32_t>(low), beyond, kept, few, count));
}

// What at least `kept` magnitudes of a chunk reach, and seldom many more.
[[gnu::always_inline]] inline int32_t likely_bound(const float* values, int kept) {
  int groups = kFewestGroups;
  const int few = kept + kept / 8;
  const auto enough = [&] { return groups >= kept + kept / 3; };
  while (!enough() && groups < kMostGroups) groups *= 2;
  if (enough()) {
    alignas(64) int32_t maxima[kMostGroups];
    std::fill_n(maxima, groups, 0);
    for (int i = 0; i < kChunk; i += kFewestGroups) {
      int32_t* const so_far = maxima + i % groups;
      for (int j = 0; j < kFewestGroups; ++j)
        so_far[j] = std::max(so_far[j], magnitude(values[i + j]));
    }
    const int32_t bound =
        reached_by(maxima, groups, kept, few, *std::min_element(maxima, maxima + groups));
    if (bound > 0) return bound;
  }
  // There are too many to keep for groups, or too many groups of zeros only.
  alignas(64) int32_t magnitudes[kChunk];
  for (int i = 0; i < kChunk; ++i) magnitudes[i] = magnitude(values[i]);
  return reached_by(magnitudes, kChunk, kept, few, 0);
}

// The places of the `kept` largest magnitudes of a chunk.
[[gnu::always_inline]] inline void select(const float* values, int kept, uint16_t* places) {
  const int32_t bound = likely_bound(values, kept);
  alignas(64) uint8_t reaches[kChunk];
  for (int i = 0; i < kChunk; ++i) reaches[i] = magnitude(values[i]) >= bound ? 1 : 0;
  alignas(64) uint8_t bits[kChunk / 8];
  pack<1>(reaches, kChunk, bits);
  // The candidates, of which a word seldom has more than a few: those are taken without a look.
  uint16_t where[kChunk + kAtOnce];
  int count = 0;
  for (int begin = 0; begin < kChunk; begin += 64) {
    uint64_t word;
    memcpy(&word, bits + begin / 8, sizeof word);
    const int end = count + __builtin_popcountll(word);
    for (int at = count; at < end || at < count + kAtOnce; ++at, word &= word - 1)
      where[at] = static_cast<uint16_t>(begin + __builtin_ctzll(word | 1ull << 63));
    count = end;
  }
  int32_t some[kChunk + kVector];
  for (int i = 0; i < count; ++i) some[i] = magnitude(values[where[i]]);
  std::fill_n(some + count, kVector, -1);
  // The greatest magnitude that `kept` of them reach; of those equal to it so many are taken.
  const int32_t low = reached_by(some, count, kept, kept, bound);
  int equals = kept - (low < INT32_MAX ? count_from(some, count, low + 1) : 0);
  for (int i = 0, at = 0; i < count && at < kept; ++i) {
    places[at] = where[i];
    const int is_equal = some[i] == low;
    at += (some[i] > low) | (is_equal & (equals > 0));
    equals -= is_equal;
  }
}

// The same of a chunk of n values: of `in`, or of what `rest` becomes when `in` is added.
[[gnu::always_inline]] inline void select(const float* in, float* rest, int n, int kept,
                                          uint16_t* places) {
  if (rest) {
    for (int i = 0; i < n; ++i) rest[i] += in[i];
    in = rest;
  }
  if (n == kChunk) return select(in, kept, places);
  float filled[kChunk] = {};  // of equal values the first are kept, so none of these
  std::copy_n(in, n, filled);
  select(filled, kept, places);
}

#define BAGUA_SELECT(isa, attribute)                                                             \
  attribute void select_##isa(const float* in, float* rest, int n, int kept, uint16_t* places) { \
    select(in, rest, n, kept, places);                                                           \
  }
BAGUA_CLONES(BAGUA_SELECT)
#define BAGUA_ENTRY(isa, attribute) select_##isa,
constexpr void (*selects[kIsaCount])(const float*, float*, int, int,
                                     uint16_t*) = {BAGUA_CLONES(BAGUA_ENTRY)};
#undef BAGUA_ENTRY
#undef BAGUA_SELECT

// Calls f(begin, count, kept, wire) for every chunk.
template <class Char, class F>
void for_chunks(const Coding& coding, int64_t count, Char* wire, F&& f) {
  for (int64_t at = 0; at < count; at += TopK::kChunk) {
    const int64_t n = std::min(TopK::kChunk, count - at);
    const int64_t kept = TopK::kept_of(coding, n);
    f(at, n, kept, wire);
    wire += 2 * kept + coding.values->wire_nbytes(coding, kept);
  }
}

}  // namespace

int64_t TopK::wire_nbytes(const Coding& coding, int64_t count) {
  const auto nbytes = [&](int64_t n) {
    const int64_t kept = kept_of(coding, n);
    return 2 * kept + coding.values->wire_nbytes(coding, kept);
  };
  return count / kChunk * nbytes(kChunk) + (count % kChunk ? nbytes(count % kChunk) : 0);
}

namespace {

// Of a chunk of `in`, or of what `rest` becomes when `in` is added.
void encode_chunk(const Coding& coding, const float* in, float* rest, int64_t n, int64_t kept,
                  char* to, Isa isa) {
  uint16_t places[kChunk];
  float values[kChunk];
  selects[static_cast<int>(isa)](in, rest, static_cast<int>(n), static_cast<int>(kept), places);
  for (int64_t i = 0; i < kept; ++i) values[i] = (rest ? rest : in)[places[i]];
  std::memcpy(to, places, static_cast<size_t>(2 * kept));
  coding.values->encode(coding, values, kept, to + 2 * kept, isa);
}

// Calls f(place, value) for all that travelled of the n values of a chunk. What came over a wire is
// not trusted to stay inside.
template <class F>
void for_kept(const Coding& coding, const char* from, int64_t n, int64_t kept, Isa isa, F&& f) {
  uint16_t places[kChunk];
  float values[kChunk];
  std::memcpy(places, from, static_cast<size_t>(2 * kept));
  coding.values->decode(coding, from + 2 * kept, kept, values, isa);
  for (int64_t i = 0; i < kept; ++i)
    if (places[i] < n) f(places[i], values[i]);
}

}  // namespace

void TopK::encode(const Coding& coding, const float* in, int64_t count, char* wire, Isa isa) {
  for_chunks(coding, count, wire, [&](int64_t at, int64_t n, int64_t kept, char* to) {
    encode_chunk(coding, in + at, nullptr, n, kept, to, isa);
  });
}

void TopK::decode(const Coding& coding, const char* wire, int64_t count, float* out, Isa isa) {
  for_chunks(coding, count, wire, [&](int64_t at, int64_t n, int64_t kept, const char* from) {
    std::fill_n(out + at, n, 0.0f);
    for_kept(coding, from, n, kept, isa, [&](int i, float value) { out[at + i] = value; });
  });
}

void TopK::decode_add(const Coding& coding, const char* wire, int64_t count, float* sum, Isa isa) {
  for_chunks(coding, count, wire, [&](int64_t at, int64_t n, int64_t kept, const char* from) {
    for_kept(coding, from, n, kept, isa, [&](int i, float value) { sum[at + i] += value; });
  });
}

void TopK::encode_rest(const Coding& coding, const float* in, float* rest, int64_t count,
                       char* wire, Isa isa) {
  for_chunks(coding, count, wire, [&](int64_t at, int64_t n, int64_t kept, char* to) {
    float* left = rest + at;
    encode_chunk(coding, in + at, left, n, kept, to, isa);
    bool finite = true;
    for_kept(coding, to, n, kept, isa, [&](int i, float value) {
      finite = finite && is_finite(value);
      left[i] = finite_or_zero(left[i] - value);
    });
    // Of what is no number some is among the kept: NaNs and Infs are larger than everything.
    for (int64_t i = 0; !finite && i < n; ++i) left[i] = finite_or_zero(left[i]);
  });
}

}  // namespace bagua
