// float16 and bfloat16 to float and back, round to nearest even, as branch-free integer code that
// compilers turn into vectors. Overflow becomes Inf, NaN stays NaN, subnormals are exact.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/both.h"
#include "common/types.h"
#include "kernel/isa.h"

namespace bagua {

BAGUA_BOTH uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
BAGUA_BOTH float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

BAGUA_BOTH float to_float(BF16 h) { return bits_float(static_cast<uint32_t>(h.bits) << 16); }

BAGUA_BOTH BF16 to_bf16(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (u >> 16) | 0x40u;
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(nan ? quiet_nan : rounded)};
}

BAGUA_BOTH float to_float(F16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t magnitude = h.bits & 0x7fffu;
  // Rebias the exponent. A subnormal is taken for the fraction of 2^-14, less 2^-14: exact, and no
  // operand is a subnormal float, each of which costs many processors a hundred cycles.
  const bool tiny = magnitude < 0x400u, special = magnitude >= 0x7c00u;
  const float x = bits_float((magnitude << 13) + (tiny ? 0x38800000u : 0x38000000u));
  const float y = x - bits_float(tiny ? 0x38800000u : 0);
  return bits_float(sign | (float_bits(y) + (special ? 0x38000000u : 0)));
}

BAGUA_BOTH F16 to_f16(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  // Normal range: rebias the exponent, round the 13 dropped bits to even; overflow carries to Inf.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal range: adding 0.5 aligns the binary point so that the FPU does the rounding.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477ff000u ? 0x7c00u : h;
  h = magnitude > 0x7f800000u ? nan : h;
  return {static_cast<uint16_t>(sign | h)};
}

// Whole arrays of float16 or bfloat16.
void widen(DType dtype, float* to, const void* from, int64_t count, Isa isa = best_isa());
void narrow(DType dtype, void* to, const float* from, int64_t count, Isa isa = best_isa());

}  // namespace bagua
