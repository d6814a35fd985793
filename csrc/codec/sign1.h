// float scale = mean magnitude, 2048 signs, 1 for negative: 260 bytes for 8192. Learns only with
// error feedback. A block that holds a NaN or an Inf decodes to NaN.
#pragma once

#include "codec/format.h"

namespace bagua {

struct Sign1 {
  static constexpr int kBlock = 2048;
  static constexpr int kBits = 1;
  using Gathered = AbsoluteSum;
  struct Head {
    float scale;
  };
  using Coder = Head;

  BAGUA_BOTH static Head head_of(const AbsoluteSum& all, int n) {
    const float mean = all.sum * (2048.0f / static_cast<float>(n));
    const float most = bits_float(0x7f7fffffu);  // a mean of numbers is one, rounded up or not
    return {is_finite(all.sum) ? lesser(mean, most) : not_a_number()};
  }
  BAGUA_BOTH static Coder coder_of(const Head& head) { return head; }
  BAGUA_BOTH static uint32_t code(float x, const Coder&) { return x < 0 ? 1u : 0u; }
  BAGUA_BOTH static float value(uint32_t word, const Coder& c, int j = 0) {
    return bits_float(float_bits(c.scale) ^ code_in<1>(word, j) << 31);
  }
  BAGUA_BOTH static float term(uint32_t word, const Coder& c, int j = 0) {
    return value(word, c, j);
  }
};

}  // namespace bagua
