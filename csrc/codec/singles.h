// Formats that code each value by itself.
#pragma once

#include "common/both.h"
#include "kernel/half.h"

namespace bagua {

struct Float {
  using Wire = float;
  BAGUA_BOTH static float code(float x) { return x; }
  BAGUA_BOTH static float value(float code) { return code; }
};
struct Half {
  using Wire = F16;
  BAGUA_BOTH static F16 code(float x) { return to_f16(x); }
  BAGUA_BOTH static float value(F16 code) { return to_float(code); }
};
struct BrainHalf {
  using Wire = BF16;
  BAGUA_BOTH static BF16 code(float x) { return to_bf16(x); }
  BAGUA_BOTH static float value(BF16 code) { return to_float(code); }
};

// A value of such a format, multiplied as a float and rounded once.
template <class S>
BAGUA_BOTH typename S::Wire scaled(typename S::Wire x, float factor) {
  return S::code(S::value(x) * factor);
}

}  // namespace bagua
