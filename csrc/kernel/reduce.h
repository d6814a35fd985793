// Element-wise reductions on host memory. They are the only arithmetic the exact collectives do.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "common/types.h"
#include "kernel/isa.h"

namespace bagua {

// What happens to a reduced value before it is rounded to the element type: value / divisor *
// factor. Average divides by the number of ranks; pre- and postscale are the factor.
struct Finish {
  double divisor = 1;
  double factor = 1;
  bool identity() const { return divisor == 1 && factor == 1; }
};

// What multiplies as the divisor divides, to the last bit, and many times as fast: powers of two
// have that. Else 0.
inline double exact_inverse(double divisor) {
  int exponent;
  const double inverse = 1 / divisor;
  const bool is_normal = std::isnormal(static_cast<float>(inverse));
  return std::frexp(divisor, &exponent) == 0.5 && is_normal ? inverse : 0;
}

// Where results go: to one place or, alike, to several; to the last `streamed` of them past the
// caches, after which stream_fence() is due before others are told.
struct Targets {
  Targets(void* one) : one_(one), all(&one_), count(1) {}  // NOLINT: a pointer is a target
  Targets(void* const* all, int count, int streamed) : all(all), count(count), streamed(streamed) {}
  Targets(const Targets&) = delete;

 private:
  void* one_ = nullptr;

 public:
  void* const* all;
  int count;
  int streamed = 0;
};

// Which sources held a NaN or an Inf that has come through to a result: bit i is of source i, the
// last one of all from there on, and of what has become too large on the way. Several threads may
// reduce parts of one job.
class OddSources {
 public:
  static constexpr int kMost = 64;
  void add(int source) {
    bits_.fetch_or(uint64_t{1} << std::min(source, kMost - 1), std::memory_order_relaxed);
  }
  bool has(int source) const { return bits_ >> std::min(source, kMost - 1) & 1; }
  bool any() const { return bits_ != 0; }

 private:
  std::atomic<uint64_t> bits_{0};
};

// dst[i] = finish(op(srcs[0][i], srcs[1][i], ...)), in that order, for every target. 16-bit floats
// accumulate in float and integers below 64 bits in a wider one, so there is one rounding per
// result. A target may be one of the sources. Rows begin at multiples of their element's size.
// Integers truncate toward zero after an average or a scale. A factor of 1/k, k whole, divides them
// exactly; by any other they are multiplied as doubles, so beyond 2^53 rounded, and what the type
// does not hold becomes its least or greatest value.
void reduce(DType dtype, ReduceOp op, const Targets& targets, const void* const* srcs, int nsrcs,
            int64_t count, Finish finish, Isa isa = best_isa(), OddSources* odd = nullptr);

// data[i] *= factor, rounded like reduce().
void scale(DType dtype, void* data, int64_t count, double factor);

// Sums of a*b, a*a and b*b in double, and a <- ca*a + cb*b: what Adasum is made of.
struct Dots {
  double ab = 0, aa = 0, bb = 0;
};
Dots dots(DType dtype, const void* a, const void* b, int64_t count, Isa isa = best_isa());
void combine(DType dtype, void* a, const void* b, double ca, double cb, int64_t count,
             Isa isa = best_isa());

}  // namespace bagua
