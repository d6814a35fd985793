// What all wire formats are made of. A format's header holds the arithmetic of one value and one
// block; how blocks are walked is somebody else's (blocks.h on CPUs), so that every processor gives
// the same bytes.
//
// A block format says
//   kBlock, kBits       values of a block, whole rows that divide 2048, and bits of a code; a whole
//                       block takes a multiple of 4 bytes
//   Gathered            what is gathered of a block before its values are coded
//   Head, Coder         what goes in front of the codes, and what a value is coded with
//   head_of, coder_of   the head of n values, and a head's coder
//   code, value         a value's code, and the value of a code, or of the j-th in a word
//   term                the same, to be added to something: a sum that is a NaN may be any, since
//                       the block it comes to tells no more than that there is one
#pragma once

#include <cstdint>
#include <cstring>

#include "common/both.h"
#include "kernel/half.h"

namespace bagua {

// Values come in rows, of which each lane has some side by side. Place p of a row gathers value p
// of all rows; then place p takes in place p + h, for h = half a row, ..., 2, 1. Sums are the same
// everywhere because this order is.
constexpr int kLanes = 32, kSideBySide = 4, kRow = kLanes * kSideBySide;

// Those side by side, which a GPU loads at once where memory lies so.
template <class T>
struct alignas(kSideBySide * sizeof(T)) Side {
  T of[kSideBySide];
};
template <class T>
BAGUA_BOTH bool in_sides(const T* x) {
  return reinterpret_cast<uintptr_t>(x) % sizeof(Side<T>) == 0;
}

// Bytes of a block of so many values.
template <class C>
constexpr int64_t block_nbytes(int64_t count) {
  return static_cast<int64_t>(sizeof(typename C::Head)) + (count * C::kBits + 7) / 8;
}

BAGUA_BOTH float not_a_number() { return bits_float(0x7fc00000u); }
// Of a NaN that arithmetic has passed on GPUs lose the bits.
BAGUA_BOTH float same_nan(float x) {
#ifdef __CUDA_ARCH__
  return x != x ? not_a_number() : x;
#else
  return x;
#endif
}
// The j-th of the codes in a word, and the same as a float.
template <int Bits>
BAGUA_BOTH uint32_t code_in(uint32_t word, int j) {
  return word >> (j * Bits) & ((1u << Bits) - 1);
}
BAGUA_BOTH uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t more) {
#ifdef __CUDA_ARCH__  // of two constants its compiler makes two instructions
  asm("lop3.b32 %0, %0, %1, %2, 0xEA;" : "+r"(x) : "r"(mask), "r"(more));
  return x;
#else
  return (x & mask) | more;
#endif
}
// Where it lies it becomes the last bits of a power of two, which is taken off again.
template <int Bits>
BAGUA_BOTH float float_by_sum(uint32_t word, int j) {
  const int first = j * Bits % 16;
  const uint32_t mask = ((1u << Bits) - 1) << first, power = 0x4b000000u - (first << 23);
  const uint32_t half = j * Bits < 16 ? word : word >> 16;
  return bits_float(masked_or(half, mask, power)) - bits_float(power);
}
template <int Bits>
BAGUA_BOTH float float_in(uint32_t word, int j) {
#ifdef __CUDA_ARCH__  // which adds four times as fast as it converts
  return float_by_sum<Bits>(word, j);
#else
  return static_cast<float>(static_cast<int32_t>(code_in<Bits>(word, j)));
#endif
}
BAGUA_BOTH bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }
BAGUA_BOTH float finite_or_zero(float x) { return is_finite(x) ? x : 0.0f; }
// 1 / x, or 0 where that is no number.
BAGUA_BOTH float inverse_or_zero(float x) {
  const float inverse = 1.0f / x;
  return is_finite(inverse) ? inverse : 0.0f;
}

BAGUA_BOTH float lesser(float a, float b) { return a < b ? a : b; }
BAGUA_BOTH uint32_t lesser(uint32_t a, uint32_t b) { return a < b ? a : b; }
BAGUA_BOTH uint32_t greater(uint32_t a, uint32_t b) { return a > b ? a : b; }

// A float's bits without the sign, which compare as integers do; those of NaNs are above all
// others.
BAGUA_BOTH uint32_t magnitude_of(float x) { return float_bits(x) & 0x7fffffffu; }

// An integer for every float, in their order: -NaN, -Inf, ..., -0, 0, ..., Inf, NaN.
BAGUA_BOTH int32_t in_order(float x) {
  const auto bits = static_cast<int32_t>(float_bits(x));
  return bits ^ (bits >> 31 & 0x7fffffff);
}
BAGUA_BOTH float from_order(int32_t place) {
  return bits_float(static_cast<uint32_t>(place ^ (place >> 31 & 0x7fffffff)));
}

// The least and the greatest value. A head must not tell which of two zeros that is.
struct Extremes {
  int32_t lo = 0x7fffffff, hi = -0x7fffffff;
  BAGUA_BOTH void add(float x) {
    const int32_t place = in_order(x);
    lo = place < lo ? place : lo;
    hi = place > hi ? place : hi;
  }
  BAGUA_BOTH void merge(const Extremes& other) {
    lo = other.lo < lo ? other.lo : lo;
    hi = other.hi > hi ? other.hi : hi;
  }
  // Whether all values are finite numbers.
  BAGUA_BOTH bool finite() const { return is_finite(from_order(lo)) && is_finite(from_order(hi)); }
  static constexpr bool kPadsWithFirst = true;
  static constexpr bool kInAnyOrder = true;
};

// The greatest magnitude.
struct Magnitude {
  int32_t top = 0;
  BAGUA_BOTH void add(float x) {
    const auto bits = static_cast<int32_t>(magnitude_of(x));
    top = bits > top ? bits : top;
  }
  BAGUA_BOTH void merge(const Magnitude& other) { top = other.top > top ? other.top : top; }
  static constexpr bool kPadsWithFirst = false;
  static constexpr bool kInAnyOrder = true;
};

// The sum of magnitudes over 2048, so that it stays finite.
struct AbsoluteSum {
  static constexpr float kOver = 1.0f / 2048;
  float sum = 0;
  BAGUA_BOTH void add(float x) { sum += bits_float(magnitude_of(x)) * kOver; }
  BAGUA_BOTH void merge(const AbsoluteSum& other) { sum += other.sum; }
  static constexpr bool kPadsWithFirst = false;
  static constexpr bool kInAnyOrder = false;
};

}  // namespace bagua
