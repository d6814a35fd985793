// What sums of 16-bit floats are multiplied by. NCCL does so before it adds, with a number of the
// values' own type, of which there are few. So it gets a power of two, by which no normal value
// loses a bit, and which keeps sums from overflowing where results do not; with the rest the sum is
// multiplied as a float, and rounded once.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/types.h"

namespace bagua {

struct ShortFactor {
  double before, after;
};

inline ShortFactor short_factor(DType dtype, double factor) {
  const int most = dtype == DType::kF16 ? 14 : 126;  // what a normal number holds, either way
  int exponent = 0;
  if (!std::isfinite(factor)) return {1, factor};
  std::frexp(factor, &exponent);  // one more than that of the number
  const int to = factor == 0 ? -most : std::clamp(exponent - 1, -most, most);
  const double before = std::copysign(std::ldexp(1.0, to), factor);
  return {before, factor / before};
}

}  // namespace bagua
