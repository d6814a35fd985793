// Codes of 8 or 4 bits on a line from a block's least to its greatest value.
//
//   lo = least + 0, hi = greatest + 0   (a zero is a positive one, whichever comes first)
//   step = hi/top - lo/top   (no overflow at the extremes), inv = 1/step, or 0 if that is no number
//   code = min(top, rint((x - lo) * inv)),  x' = lo + code * step
//
// in float32, in this order, without fused multiply-add. A constant block decodes exactly; a block
// that holds a NaN or an Inf decodes to NaN, so that whoever scales losses sees it. The error is at
// most step/2, unless hi - lo is no finite number, or so small that 1/step is none (then all values
// decode to lo).
#pragma once

#include "codec/format.h"

namespace bagua {

template <int Bits, int Block>
struct MinMax {
  static constexpr int kBlock = Block;
  static constexpr int kBits = Bits;
  static constexpr float kTop = static_cast<float>((1 << Bits) - 1);
  using Gathered = Extremes;
  struct Head {
    float lo, step;
  };
  struct Coder {
    float lo, step, inverse;
  };

  BAGUA_BOTH static Head head_of(const Extremes& all, int) {
    if (!all.finite()) return {not_a_number(), 0.0f};
    const float lo = from_order(all.lo) + 0.0f, hi = from_order(all.hi) + 0.0f;
    return {lo, hi / kTop - lo / kTop};
  }
  BAGUA_BOTH static Coder coder_of(const Head& head) {
    return {head.lo, head.step, inverse_or_zero(head.step)};
  }
  BAGUA_BOTH static uint32_t code(float x, const Coder& c) {
    // From 2^23 on a float has no fraction: adding 1.5 * 2^23 rounds to nearest even, and leaves
    // the code in the last bits. What is no number is above `most`, as a word.
    constexpr uint32_t top = (1u << Bits) - 1, most = 0x4b400000u + top;
    const uint32_t place = float_bits((x - c.lo) * c.inverse + 12582912.0f);
    return (place < most ? place : most) & top;
  }
  BAGUA_BOTH static float term(uint32_t word, const Coder& c, int j = 0) {
    return c.lo + float_in<Bits>(word, j) * c.step;
  }
  BAGUA_BOTH static float value(uint32_t word, const Coder& c, int j = 0) {
    return same_nan(term(word, c, j));
  }
};

}  // namespace bagua
