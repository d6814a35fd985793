// What all wire formats are made of. A format's header holds the arithmetic of one value and one
// block; how blocks are walked is somebody else's (blocks.h on CPUs), so that every processor gives
// the same bytes.
//
// A block format says
//   kBlock, kBits       values of a block, bits of a code
//   Gathered            what is gathered of a block before its values are coded, lane by lane
//   Head, Coder         what goes in front of the codes, and what a value is coded with
//   head_of, coder_of   the head of n values, and a head's coder
//   code, value         a value's code, and a code's value
#pragma once

#include <cstdint>
#include <cstring>

#include "common/both.h"

namespace bagua {

// Lane l gathers values l, l + kLanes, ...; then lane l takes in lane l + h, for h = kLanes / 2,
// ..., 2, 1. Sums are the same everywhere because this order is.
constexpr int kLanes = 32;

// Bytes of a block of so many values.
template <class C>
constexpr int64_t block_nbytes(int64_t count) {
  return static_cast<int64_t>(sizeof(typename C::Head)) + (count * C::kBits + 7) / 8;
}

BAGUA_BOTH uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
BAGUA_BOTH float from_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}
BAGUA_BOTH float not_a_number() { return from_bits(0x7fc00000u); }
// Of a NaN that arithmetic has passed on GPUs lose the bits.
BAGUA_BOTH float same_nan(float x) {
#ifdef __CUDA_ARCH__
  return x != x ? not_a_number() : x;
#else
  return x;
#endif
}
BAGUA_BOTH bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
BAGUA_BOTH float finite_or_zero(float x) { return is_finite(x) ? x : 0.0f; }
// 1 / x, or 0 where that is no number.
BAGUA_BOTH float inverse_or_zero(float x) {
  const float inverse = 1.0f / x;
  return is_finite(inverse) ? inverse : 0.0f;
}

// V is a vector of some lanes, or float for one; I the integers that go with it.
template <class V>
BAGUA_BOTH V lesser(V a, V b) {
  return a < b ? a : b;
}
template <class V>
BAGUA_BOTH V greater(V a, V b) {
  return a > b ? a : b;
}

// The least and the greatest value, and whether some value is no finite number. Which of two zeros
// is the least depends on their order, so heads must not tell.
template <class V, class I>
struct Extremes {
  V lo, hi;
  I bad;
  BAGUA_BOTH void begin(V x) {
    lo = hi = x;
    bad = I{};
  }
  BAGUA_BOTH void add(V x, I bits) {
    lo = lesser(x, lo);
    hi = greater(x, hi);
    bad |= (bits & 0x7f800000) == 0x7f800000;
  }
  BAGUA_BOTH void merge(const Extremes& other) {
    lo = lesser(other.lo, lo);
    hi = greater(other.hi, hi);
    bad |= other.bad;
  }
  static constexpr bool kPadsWithFirst = true;
  static constexpr bool kInAnyOrder = true;
};

// The greatest magnitude, as its bits: those of a NaN are above all others.
template <class V, class I>
struct Magnitude {
  I top;
  BAGUA_BOTH void begin(V) { top = I{}; }
  BAGUA_BOTH void add(V, I bits) { top = greater(bits & 0x7fffffff, top); }
  BAGUA_BOTH void merge(const Magnitude& other) { top = greater(other.top, top); }
  static constexpr bool kPadsWithFirst = false;
  static constexpr bool kInAnyOrder = true;
};

// The sum of magnitudes over 2048, so that it stays finite.
template <class V, class I>
struct AbsoluteSum {
  static constexpr float kOver = 1.0f / 2048;
  V sum;
  BAGUA_BOTH void begin(V) { sum = V{}; }
  BAGUA_BOTH void add(V x, I) { sum += (x < 0 ? -x : x) * kOver; }
  BAGUA_BOTH void merge(const AbsoluteSum& other) { sum += other.sum; }
  static constexpr bool kPadsWithFirst = false;
  static constexpr bool kInAnyOrder = false;
};

}  // namespace bagua
