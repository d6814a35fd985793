// Formats that code each value by itself. Its term is its value, to be added to something: of a NaN
// any, since GPUs add to one NaN whatever it is.
#pragma once

#include "common/both.h"
#include "kernel/half.h"

namespace bagua {

struct Float {
  using Wire = float;
  BAGUA_BOTH static float code(float x) { return x; }
  BAGUA_BOTH static float value(float code) { return code; }
  BAGUA_BOTH static float term(float code) { return code; }
};
struct Half {
  using Wire = F16;
  BAGUA_BOTH static F16 code(float x) { return to_f16(x); }
  BAGUA_BOTH static float value(F16 code) { return to_float(code); }
  BAGUA_BOTH static float term(F16 code) {
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(code.bits));
    return x;
#else
    return to_float(code);
#endif
  }
};
struct BrainHalf {
  using Wire = BF16;
  BAGUA_BOTH static BF16 code(float x) { return to_bf16(x); }
  BAGUA_BOTH static float value(BF16 code) { return to_float(code); }
  BAGUA_BOTH static float term(BF16 code) { return to_float(code); }
};

// A value of such a format, multiplied as it is computed with, and rounded once.
template <class S, class Factor>
BAGUA_BOTH typename S::Wire scaled(typename S::Wire x, Factor factor) {
  return S::code(S::value(x) * factor);
}

}  // namespace bagua
