#include "codec/topk.h"

#include <algorithm>
#include <cstring>

#include "codec/format.h"

namespace bagua {
namespace {

constexpr int kChunk = static_cast<int>(TopK::kChunk);

// Counted in whole vectors: what follows the end must be there, and -1.
constexpr int kGroup = 32;

[[gnu::always_inline]] inline int count_from(const int32_t* magnitudes, int n, int32_t least) {
  int32_t reach = 0;
  for (int i = 0; i < n; i += kGroup)
    for (int j = 0; j < kGroup; ++j) reach += magnitudes[i + j] >= least ? 1 : 0;
  return reach;
}

// A magnitude that at least `kept` of n reach, and few more if possible: by halving.
[[gnu::always_inline]] inline int32_t reached(const int32_t* magnitudes, int n, int kept, int few) {
  int32_t low = 0, high = 0;
  for (int i = 0; i < n; ++i) high = magnitudes[i] > high ? magnitudes[i] : high;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2 + (high - low) % 2;
    const int reach = count_from(magnitudes, n, middle);
    if (reach < kept) {
      high = middle - 1;
      continue;
    }
    low = middle;
    if (reach <= few) break;
  }
  return low;
}

// The places of the `kept` largest magnitudes of a chunk. `guess` is where the last search ended: a
// chunk is often like the one before it.
[[gnu::always_inline]] inline void select(const int32_t* magnitudes, int kept, uint16_t* places,
                                          int32_t* guess) {
  const int few = 4 * kept + 64;
  int32_t least = *guess;
  const int reach = count_from(magnitudes, kChunk, least);
  if (reach < kept || reach > few) least = reached(magnitudes, kChunk, kept, few);
  // The candidates, and the greatest magnitude that `kept` of them reach.
  uint16_t where[kChunk];
  int32_t some[kChunk + kGroup];
  int n = 0;
  constexpr int kFew = 8;  // most groups of so many have none
  for (int begin = 0; begin < kChunk; begin += kFew) {
    int32_t any = 0;
    for (int i = 0; i < kFew; ++i) any |= magnitudes[begin + i] >= least ? 1 : 0;
    if (!any) continue;
    for (int i = begin; i < begin + kFew; ++i) {
      some[n] = magnitudes[i];
      where[n] = static_cast<uint16_t>(i);
      n += magnitudes[i] >= least ? 1 : 0;
    }
  }
  for (int i = 0; i < kGroup; ++i) some[n + i] = -1;
  const int32_t low = reached(some, n, kept, kept);
  // Of those equal to it so many are taken.
  int equals = kept - count_from(some, n, low + 1);
  for (int i = 0, at = 0; at < kept; ++i) {
    if (some[i] < low || (some[i] == low && equals-- <= 0)) continue;
    places[at++] = where[i];
  }
  *guess = low > (1 << 20) ? low - (1 << 20) : 0;  // an eighth less
}

#define BAGUA_SELECT(isa, attribute)                                                 \
  attribute void select_##isa(const int32_t* magnitudes, int kept, uint16_t* places, \
                              int32_t* guess) {                                      \
    select(magnitudes, kept, places, guess);                                         \
  }
BAGUA_CLONES(BAGUA_SELECT)
#define BAGUA_ENTRY(isa, attribute) select_##isa,
constexpr void (*selects[kIsaCount])(const int32_t*, int, uint16_t*,
                                     int32_t*) = {BAGUA_CLONES(BAGUA_ENTRY)};
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

void TopK::encode(const Coding& coding, const float* in, int64_t count, char* wire, Isa isa) {
  int32_t magnitudes[kChunk];
  uint16_t places[kChunk];
  float values[kChunk];
  thread_local int32_t guess = 0;  // whatever it is, it changes nothing but the speed
  for_chunks(coding, count, wire, [&](int64_t at, int64_t n, int64_t kept, char* to) {
    for (int64_t i = 0; i < n; ++i)
      magnitudes[i] = static_cast<int32_t>(bits_of(in[at + i]) & 0x7fffffffu);
    std::fill(magnitudes + n, magnitudes + kChunk, -1);
    selects[static_cast<int>(isa)](magnitudes, static_cast<int>(kept), places, &guess);
    for (int64_t i = 0; i < kept; ++i) values[i] = in[at + places[i]];
    std::memcpy(to, places, static_cast<size_t>(2 * kept));
    coding.values->encode(coding, values, kept, to + 2 * kept, isa);
  });
}

namespace {

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
    for (int64_t i = 0; i < n; ++i) left[i] += in[at + i];
    encode(coding, left, n, to, isa);
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
