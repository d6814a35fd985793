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
  template <class V, class I>
  using Gathered = Extremes<V, I>;
  struct Head {
    float lo, step;
  };
  struct Coder {
    float lo, step, inverse;
  };

  BAGUA_BOTH static Head head_of(const Extremes<float, int32_t>& all, int) {
    if (all.bad) return {not_a_number(), 0.0f};
    const float lo = all.lo + 0.0f, hi = all.hi + 0.0f;
    return {lo, hi / kTop - lo / kTop};
  }
  BAGUA_BOTH static Coder coder_of(const Head& head) {
    return {head.lo, head.step, inverse_or_zero(head.step)};
  }
  BAGUA_BOTH static uint32_t code(float x, const Coder& c) {
    const float place = lesser((x - c.lo) * c.inverse, kTop);
    // From 2^23 on a float has no fraction: adding 1.5 * 2^23 rounds to nearest even.
    return bits_of(place + 12582912.0f) & ((1u << Bits) - 1);
  }
  BAGUA_BOTH static float value(uint32_t code, const Coder& c) {
    return same_nan(c.lo + static_cast<float>(static_cast<int32_t>(code)) * c.step);
  }
};

}  // namespace bagua
