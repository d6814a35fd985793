// What a sum of floats is multiplied by, where NCCL does only a part of that. It multiplies before
// it adds, with a number of the values' own type. Of 16 bits there are few: it gets a power of two,
// which keeps sums from overflowing where results do not, and by which only those values lose bits
// that become too small for normal numbers; with the rest the sum is multiplied as a float, and
// rounded once. With a single rank it is not asked to multiply, since before 2.29.7 it loses the
// last values then (NVIDIA/nccl#1950).
#pragma once

#include <algorithm>
#include <cmath>

#include "common/types.h"

namespace bagua {

struct SplitFactor {
  double before, after;
};

inline SplitFactor split_factor(DType dtype, double factor, int ranks) {
  const bool is_short = dtype == DType::kF16 || dtype == DType::kBF16;
  if (ranks == 1) return {1, factor};
  if (!is_short) return {factor, 1};
  const int most = dtype == DType::kF16 ? 14 : 126;  // what a normal number holds, either way
  int exponent = 0;
  if (!std::isfinite(factor)) return {1, factor};
  std::frexp(factor, &exponent);  // one more than that of the number
  const int to = factor == 0 ? -most : std::clamp(exponent - 1, -most, most);
  const double before = std::copysign(std::ldexp(1.0, to), factor);
  return {before, factor / before};
}

}  // namespace bagua
