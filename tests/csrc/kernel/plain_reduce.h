// What a reduction means, one element at a time: the oracle of the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "common/types.h"
#include "kernel/half.h"
#include "kernel/reduce.h"

namespace bagua {

// One element as a value wide enough to reduce in, and back. The widths are the kernel's promise.
template <class T>
struct Oracle {
  using Wide = T;
  static Wide widen(T x) { return x; }
  static T narrow(Wide x) { return x; }
};
template <>
struct Oracle<F16> {
  using Wide = float;
  static float widen(F16 x) { return to_float(x); }
  static F16 narrow(float x) { return to_f16(x); }
};
template <>
struct Oracle<BF16> {
  using Wide = float;
  static float widen(BF16 x) { return to_float(x); }
  static BF16 narrow(float x) { return to_bf16(x); }
};
#define WIDE_INTEGER(T)                                      \
  template <>                                                \
  struct Oracle<T> {                                         \
    using Wide = int64_t;                                    \
    static int64_t widen(T x) { return x; }                  \
    static T narrow(int64_t x) { return static_cast<T>(x); } \
  };
WIDE_INTEGER(bool)
WIDE_INTEGER(uint8_t)
WIDE_INTEGER(int8_t)
WIDE_INTEGER(int16_t)
WIDE_INTEGER(int32_t)
#undef WIDE_INTEGER

template <class W>
W plain_op(ReduceOp op, W a, W b) {
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) {
    if constexpr (std::is_arithmetic_v<W>)  // of equal ones, as the two zeros are, the later
      return a != a || (op == ReduceOp::kMin ? a < b : a > b) ? a : b;
  }
  const bool product = op == ReduceOp::kProduct;
  if constexpr (std::is_integral_v<W>) {  // which wraps around
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<W>(product ? x * y : x + y);
  } else {
    return product ? a * b : a + b;
  }
}

// T is the type that holds the result.
template <class T, class W>
W plain_finish(W x, Finish f) {
  if (f.identity()) return x;
  if constexpr (std::is_integral_v<W>) {
    using L = std::numeric_limits<std::conditional_t<std::is_same_v<T, bool>, int32_t, T>>;
    const double by = std::round(1 / f.factor);  // 1 where the factor is
    if (std::abs(by) >= 1 && f.factor == 1 / by)
      return std::clamp<W>(x / static_cast<W>(f.divisor * by), L::min(), L::max());
    const double y = std::trunc(static_cast<double>(x) / f.divisor * f.factor);
    if (y >= std::ldexp(1.0, L::digits)) return L::max();
    return y > static_cast<double>(L::min()) ? static_cast<W>(y) : L::min();
  } else if constexpr (std::is_floating_point_v<W>) {
    return x / static_cast<W>(f.divisor) * static_cast<W>(f.factor);
  } else {
    using Real = typename W::value_type;
    return x / static_cast<Real>(f.divisor) * static_cast<Real>(f.factor);
  }
}

// Small and without surprises.
template <class T>
T number(std::mt19937& random) {
  const int x = static_cast<int>(random() % 7) - 3;
  using O = Oracle<T>;
  if constexpr (std::is_same_v<T, bool>) return x > 0;
  if constexpr (std::is_unsigned_v<T>) return static_cast<T>(x + 3);
  if constexpr (std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>)
    return T(x, static_cast<int>(random() % 5));
  if constexpr (std::is_integral_v<T>) return static_cast<T>(x);
  return O::narrow(static_cast<typename O::Wide>(x) * static_cast<typename O::Wide>(0.37));
}

// Half of them like that, the others of any bits: overflow, NaN, Inf, subnormal, either zero.
template <class T>
T any_number(std::mt19937& random) {
  if constexpr (std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>) {
    using Real = typename T::value_type;
    const Real real = any_number<Real>(random);
    return T(real, any_number<Real>(random));
  } else if constexpr (std::is_floating_point_v<T>) {
    using L = std::numeric_limits<T>;
    constexpr T special[] = {0,        -T(0),     L::infinity(),   -L::infinity(), L::quiet_NaN(),
                             L::max(), -L::max(), L::denorm_min(), -L::min()};
    if (random() % 8 == 0) return special[random() % std::size(special)];
  }
  T x = number<T>(random);
  if (std::is_same_v<T, bool> || random() % 2 == 0) return x;
  uint64_t bits = random();
  bits = bits << 32 | random();
  std::memcpy(static_cast<void*>(&x), &bits, std::min(sizeof x, sizeof bits));
  return x;
}

// Equal bits, but one NaN is as good as another: which of two goes on, processors decide.
template <class T>
bool same(T a, T b) {
  if constexpr (std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>) {
    return same(a.real(), b.real()) && same(a.imag(), b.imag());
  } else {
    const auto x = Oracle<T>::widen(a), y = Oracle<T>::widen(b);
    return std::memcmp(&a, &b, sizeof a) == 0 || (x != x && y != y);
  }
}

// Whether the operation is allowed for the type at all.
inline bool meaningful(DType dtype, ReduceOp op) {
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) return !is_complex(dtype);
  return !(dtype == DType::kBool && op == ReduceOp::kAverage);
}

}  // namespace bagua
