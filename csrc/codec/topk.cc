#include "codec/topk.h"

#include <algorithm>
#include <cstring>

#include "codec/format.h"

namespace bagua {
namespace {

constexpr int kChunk = static_cast<int>(TopK::kChunk);

[[gnu::always_inline]] inline int count_from(const int32_t* magnitudes, int32_t least) {
  int32_t n = 0;
  for (int i = 0; i < kChunk; ++i) n += magnitudes[i] >= least ? 1 : 0;
  return n;
}

// The places of the `kept` largest magnitudes. What follows the chunk's end is -1.
[[gnu::always_inline]] inline void select(const int32_t* magnitudes, int kept, uint16_t* places) {
  // The greatest magnitude that at least `kept` reach, by halving.
  int32_t low = 0, high = 0;
  for (int i = 0; i < kChunk; ++i) high = magnitudes[i] > high ? magnitudes[i] : high;
  int reach = kChunk;
  while (low < high && reach != kept) {
    const int32_t middle = low + (high - low) / 2 + (high - low) % 2;
    const int n = count_from(magnitudes, middle);
    if (n >= kept) {
      low = middle;
      reach = n;
    } else {
      high = middle - 1;
    }
  }
  // Of those equal to it so many are taken.
  int equals = reach == kept ? kept : kept - count_from(magnitudes, low + 1);
  int at = 0;
  constexpr int kGroup = 32;
  for (int begin = 0; begin < kChunk && at < kept; begin += kGroup) {
    int32_t any = 0;
    for (int i = 0; i < kGroup; ++i) any |= magnitudes[begin + i] >= low ? 1 : 0;
    if (!any) continue;
    for (int i = begin; i < begin + kGroup && at < kept; ++i) {
      if (magnitudes[i] < low) continue;
      if (magnitudes[i] == low && equals-- <= 0) continue;
      places[at++] = static_cast<uint16_t>(i);
    }
  }
}

#define BAGUA_SELECT(isa, attribute)                                                   \
  attribute void select_##isa(const int32_t* magnitudes, int kept, uint16_t* places) { \
    select(magnitudes, kept, places);                                                  \
  }
BAGUA_CLONES(BAGUA_SELECT)
#define BAGUA_ENTRY(isa, attribute) select_##isa,
constexpr void (*selects[kIsaCount])(const int32_t*, int, uint16_t*) = {BAGUA_CLONES(BAGUA_ENTRY)};
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
  for_chunks(coding, count, wire, [&](int64_t at, int64_t n, int64_t kept, char* to) {
    for (int64_t i = 0; i < n; ++i)
      magnitudes[i] = static_cast<int32_t>(bits_of(in[at + i]) & 0x7fffffffu);
    std::fill(magnitudes + n, magnitudes + kChunk, -1);
    selects[static_cast<int>(isa)](magnitudes, static_cast<int>(kept), places);
    for (int64_t i = 0; i < kept; ++i) values[i] = in[at + places[i]];
    std::memcpy(to, places, static_cast<size_t>(2 * kept));
    coding.values->encode(coding, values, kept, to + 2 * kept, isa);
  });
}

void TopK::decode(const Coding& coding, const char* wire, int64_t count, float* out, Isa isa) {
  uint16_t places[kChunk];
  float values[kChunk];
  for_chunks(coding, count, wire, [&](int64_t at, int64_t n, int64_t kept, const char* from) {
    std::memcpy(places, from, static_cast<size_t>(2 * kept));
    coding.values->decode(coding, from + 2 * kept, kept, values, isa);
    std::fill_n(out + at, n, 0.0f);
    // What came over a wire is not trusted to stay inside.
    for (int64_t i = 0; i < kept; ++i)
      if (places[i] < n) out[at + places[i]] = values[i];
  });
}

}  // namespace bagua
