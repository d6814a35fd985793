// float scale = greatest magnitude / 448, 512 codes: 516 bytes for 2048. A code is a float with 4
// bits of exponent and 3 of mantissa, rounded to nearest even; 448 is the greatest there is. A
// block that holds a NaN or an Inf decodes to NaN; its codes have no sign, for that of a NaN is the
// processor's choice.
#pragma once

#include "codec/format.h"

namespace bagua {

struct Fp8E4M3 {
  static constexpr int kBlock = 512;
  static constexpr int kBits = 8;
  static constexpr float kGreatest = 448.0f;
  using Gathered = Magnitude;
  struct Head {
    float scale;
  };
  struct Coder {
    float scale, inverse;
    uint32_t sign;  // the bit that says it
  };

  BAGUA_BOTH static Head head_of(const Magnitude& all, int) {
    const float top = bits_float(static_cast<uint32_t>(all.top));
    return {is_finite(top) ? top / kGreatest : not_a_number()};
  }
  BAGUA_BOTH static Coder coder_of(const Head& head) {
    return {head.scale, inverse_or_zero(head.scale), is_finite(head.scale) ? 0x80u : 0u};
  }
  BAGUA_BOTH static uint32_t code(float x, const Coder& c) {
    const uint32_t u = float_bits(x * c.inverse);
    const uint32_t sign = float_bits(x) >> 24 & c.sign;  // nor has that of 0 * Inf a meaning
    uint32_t magnitude = u & 0x7fffffffu;
    const uint32_t greatest = 0x43e00000u;  // of 448
    magnitude = magnitude < greatest ? magnitude : greatest;
    // From 2^-6 on: rebias the exponent by 120, round the 20 dropped bits to even.
    const uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    // Below: adding 2^14 aligns the last bit with 2^-9, and the processor rounds.
    const uint32_t subnormal = float_bits(bits_float(magnitude) + 16384.0f) - 0x46800000u;
    return sign | (magnitude < 0x3c800000u ? subnormal : normal);
  }
  // What a code says of 1, in two ways. With exponent and mantissa where a float has them it is
  // 2^120 times too small, and may be subnormal, which costs a CPU a hundred cycles and a GPU none.
  BAGUA_BOTH static float by_choice(uint32_t code) {
    const uint32_t magnitude = code & 0x7fu;
    const uint32_t sign = (code & 0x80u) << 24;
    const float fraction = static_cast<float>(static_cast<int32_t>(magnitude)) * 0.001953125f;
    const float normal = bits_float((magnitude << 20) + 0x3c000000u);
    return bits_float(float_bits(magnitude < 8u ? fraction : normal) | sign);
  }
  BAGUA_BOTH static float by_product(uint32_t word, int j) {
    const auto at_top = static_cast<int32_t>(word << (24 - 8 * j));
    return bits_float(static_cast<uint32_t>(at_top >> 4) & 0x87f00000u) * 0x1p120f;
  }
  BAGUA_BOTH static float term(uint32_t word, const Coder& c, int j = 0) {
#ifdef __CUDA_ARCH__
    return by_product(word, j) * c.scale;
#else
    return by_choice(code_in<8>(word, j)) * c.scale;
#endif
  }
  BAGUA_BOTH static float value(uint32_t word, const Coder& c, int j = 0) {
    return same_nan(term(word, c, j));
  }
};

}  // namespace bagua
