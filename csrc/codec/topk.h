// Of every 4096 values the `kept` largest by magnitude; of equal ones the first. A chunk travels as
// their places, uint16 in ascending order, then their values by a codec of its own. A shorter last
// chunk keeps as large a share, rounded up. NaNs are larger than everything, and all equal. Learns
// only with error feedback.
#pragma once

#include "codec/codec.h"
#include "codec/format.h"
#include "common/both.h"

namespace bagua {

struct TopK {
  static constexpr int64_t kChunk = 4096;
  // What values are compared by. Processors that add to a NaN do not agree on its bits.
  BAGUA_BOTH static uint32_t magnitude(float x) { return lesser(magnitude_of(x), 0x7f800001u); }
  // Values kept of a chunk of this many.
  static int64_t kept_of(const Coding& coding, int64_t count) {
    return (count * coding.kept + kChunk - 1) / kChunk;
  }
  static int64_t wire_nbytes(const Coding& coding, int64_t count);
  static void encode(const Coding& coding, const float* in, int64_t count, char* wire, Isa isa);
  static void decode(const Coding& coding, const char* wire, int64_t count, float* out, Isa isa);
  static void encode_rest(const Coding& coding, const float* in, float* rest, int64_t count,
                          char* wire, Isa isa);
  static void decode_add(const Coding& coding, const char* wire, int64_t count, float* sum,
                         Isa isa);
};

// How every processor searches, where count(x) tells how many values reach x: count(low) is at
// least `kept`, and count(high) less. Returns the greatest x that `kept` reach, or sooner any that
// at least so many reach and at most `few`.
template <class Count>
BAGUA_BOTH uint32_t reached(uint32_t low, uint32_t high, int kept, int few, Count&& count) {
  if (low + 1 < high && count(low + 1) < kept) return low;  // as of zeros, and of equal values
  while (low + 1 < high) {
    const uint32_t middle = low + (high - low) / 2;
    const int reach = count(middle);
    if (reach < kept) {
      high = middle;
    } else {
      low = middle;
      if (reach <= few) break;
    }
  }
  return low;
}

}  // namespace bagua
