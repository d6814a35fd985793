// Every element type and reduction, against a plain loop over one element at a time.
#include "kernel/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernel/half.h"
#include "kernel/stream.h"

namespace bagua {
namespace {

constexpr int64_t kCounts[] = {0, 1, 7, 8, 2047, 2048, 2049};
constexpr int kGuard = 5;  // elements before and after, which also misalign the vector

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
W reduced(ReduceOp op, const std::vector<W>& values) {
  W result = values[0];
  for (size_t i = 1; i < values.size(); ++i) {
    const W x = values[i];
    if (op == ReduceOp::kProduct) {
      result = result * x;
    } else if (op == ReduceOp::kMin || op == ReduceOp::kMax) {
      if constexpr (std::is_arithmetic_v<W>) {
        const bool replace = op == ReduceOp::kMin ? x < result : x > result;
        if (result == result && (replace || x != x)) result = x;
      }
    } else {
      result = result + x;
    }
  }
  return result;
}

template <class W>
W finished(W x, Finish f) {
  if (f.identity()) return x;
  if constexpr (std::is_integral_v<W>) {
    if (f.factor == 1) return x / static_cast<W>(f.divisor);
    return static_cast<W>(static_cast<double>(x) / f.divisor * f.factor);
  } else if constexpr (std::is_floating_point_v<W>) {
    return x / static_cast<W>(f.divisor) * static_cast<W>(f.factor);
  } else {
    using Real = typename W::value_type;
    return x / static_cast<Real>(f.divisor) * static_cast<Real>(f.factor);
  }
}

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

template <class T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

bool meaningful(DType dtype, ReduceOp op) {
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) return !is_complex(dtype);
  return !(dtype == DType::kBool && op == ReduceOp::kAverage);
}

// `into`: which source is also the destination, -1 for a vector of its own.
template <class T>
void check_reduce(DType dtype, ReduceOp op, int nsrcs, int64_t count, Finish finish, int into) {
  using O = Oracle<T>;
  std::mt19937 random(static_cast<unsigned>(count * 31 + nsrcs));
  const size_t size = static_cast<size_t>(count) + 2 * kGuard;
  std::vector<std::vector<char>> memory;
  std::vector<T*> rows;
  for (int s = 0; s <= nsrcs; ++s) {
    memory.emplace_back(size * sizeof(T));
    rows.push_back(reinterpret_cast<T*>(memory.back().data()));
    for (size_t i = 0; i < size; ++i) rows.back()[i] = number<T>(random);
  }
  std::vector<const void*> srcs;
  for (int s = 0; s < nsrcs; ++s) srcs.push_back(rows[static_cast<size_t>(s)] + kGuard);
  T* dst = rows[static_cast<size_t>(into < 0 ? nsrcs : into)];
  const auto expected = std::make_unique<T[]>(size);  // not a vector: that of bool has no elements
  std::copy(dst, dst + size, expected.get());
  for (int64_t i = 0; i < count; ++i) {
    std::vector<typename O::Wide> values;
    for (int s = 0; s < nsrcs; ++s)
      values.push_back(O::widen(rows[static_cast<size_t>(s)][kGuard + i]));
    expected[static_cast<size_t>(kGuard + i)] = O::narrow(finished(reduced(op, values), finish));
  }
  const auto check = [&](const T* found, const std::string& how) {
    for (size_t i = 0; i < size; ++i)
      ASSERT_TRUE(same_bits(found[i], expected[i]))
          << dtype_name(dtype) << " " << op_name(op) << ", " << nsrcs << " sources, " << count
          << " elements, into " << into << ", " << how << ": differs at "
          << static_cast<int64_t>(i) - kGuard;
  };
  // On every instruction set, into several targets, past the caches or not.
  const auto other = std::make_unique<T[]>(size), another = std::make_unique<T[]>(size);
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!has_isa(static_cast<Isa>(isa))) continue;
    for (const int streamed : {0, 1, 2}) {
      std::copy(dst, dst + size, other.get());
      std::copy(dst, dst + size, another.get());
      void* targets[] = {other.get() + kGuard, another.get() + kGuard};
      reduce(dtype, op, {targets, 2, streamed}, srcs.data(), nsrcs, count, finish,
             static_cast<Isa>(isa));
      stream_fence();
      check(other.get(), isa_name(static_cast<Isa>(isa)));
      check(another.get(), isa_name(static_cast<Isa>(isa)));
    }
  }
  reduce(dtype, op, dst + kGuard, srcs.data(), nsrcs, count, finish);
  check(dst, "in place");
}

class EveryType : public testing::TestWithParam<int> {
 protected:
  DType dtype() const { return static_cast<DType>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Reduce, EveryType, testing::Range(0, kDTypeCount), [](const auto& info) {
  return dtype_name(static_cast<DType>(info.param));
});

TEST_P(EveryType, ReducesLikeAPlainLoop) {
  dispatch(dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (const ReduceOp op :
         {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      if (!meaningful(dtype(), op)) continue;
      for (int nsrcs = 1; nsrcs <= 5; ++nsrcs)
        for (const int64_t count : kCounts) {
          const Finish finish{op == ReduceOp::kAverage ? static_cast<double>(nsrcs) : 1.0, 1};
          for (const int into : {-1, 0, nsrcs - 1})
            check_reduce<T>(dtype(), op, nsrcs, count, finish, into);
          if (HasFatalFailure()) return;
        }
    }
  });
}

TEST_P(EveryType, ScalesAfterReducing) {
  if (dtype() == DType::kBool) return;  // any and all know no scale
  dispatch(dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (const Finish finish : {Finish{1, 0.5}, Finish{3, 2.5}, Finish{4, 1}})
      for (const int64_t count : kCounts) {
        check_reduce<T>(dtype(), ReduceOp::kSum, 3, count, finish, 1);
        if (HasFatalFailure()) return;
      }
  });
}

template <class T>
T reduce_two(DType dtype, ReduceOp op, T a, T b) {
  const void* srcs[] = {&a, &b};
  T result{};
  reduce(dtype, op, &result, srcs, 2, 1, {});
  return result;
}

TEST(Reduce, NanPassesThroughFromEitherSide) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    EXPECT_TRUE(std::isnan(reduce_two<float>(DType::kF32, op, NAN, 1))) << op_name(op);
    EXPECT_TRUE(std::isnan(reduce_two<float>(DType::kF32, op, 1, NAN))) << op_name(op);
    EXPECT_TRUE(std::isnan(reduce_two<double>(DType::kF64, op, NAN, 1))) << op_name(op);
    EXPECT_TRUE(std::isnan(reduce_two<double>(DType::kF64, op, 1, NAN))) << op_name(op);
    const F16 nan = to_f16(NAN), one = to_f16(1);
    EXPECT_TRUE(std::isnan(to_float(reduce_two(DType::kF16, op, nan, one)))) << op_name(op);
    EXPECT_TRUE(std::isnan(to_float(reduce_two(DType::kF16, op, one, nan)))) << op_name(op);
  }
}

TEST(Reduce, InfinityAndOverflow) {
  const float infinity = INFINITY, large = std::numeric_limits<float>::max();
  EXPECT_EQ(reduce_two(DType::kF32, ReduceOp::kSum, infinity, 1.0f), infinity);
  EXPECT_TRUE(std::isnan(reduce_two(DType::kF32, ReduceOp::kSum, infinity, -infinity)));
  EXPECT_EQ(reduce_two(DType::kF32, ReduceOp::kSum, large, large), infinity);
  const F16 most = to_f16(65504);
  EXPECT_EQ(to_float(reduce_two(DType::kF16, ReduceOp::kSum, most, most)), infinity);
  EXPECT_EQ(to_float(reduce_two(DType::kF16, ReduceOp::kMin, most, to_f16(-infinity))), -infinity);
}

TEST(Reduce, SixteenBitSumsRoundOnce) {
  // 2048 + 1 is a tie in float16, and rounding after every addition would stay at 2048.
  std::vector<F16> values(4, to_f16(1));
  values[0] = to_f16(2048);
  std::vector<const void*> srcs;
  for (const F16& value : values) srcs.push_back(&value);
  F16 sum{};
  reduce(DType::kF16, ReduceOp::kSum, &sum, srcs.data(), 4, 1, {});
  EXPECT_EQ(to_float(sum), 2052);  // 2051 rounded to even
}

TEST(Reduce, AverageOfNarrowIntegersDoesNotOverflow) {
  const int8_t a = 127, b = 125, c = -128;
  const void* high[] = {&a, &b, &a};
  const void* low[] = {&c, &c, &c};
  int8_t result = 0;
  reduce(DType::kI8, ReduceOp::kAverage, &result, high, 3, 1, Finish{3, 1});
  EXPECT_EQ(result, 126);
  reduce(DType::kI8, ReduceOp::kAverage, &result, low, 3, 1, Finish{3, 1});
  EXPECT_EQ(result, -128);
}

// As in NumPy and torch: no undefined behaviour, whatever the number of sources.
TEST(Reduce, IntegerOverflowWrapsAround) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(reduce_two<int64_t>(DType::kI64, ReduceOp::kSum, most, 1),
            std::numeric_limits<int64_t>::min());
  EXPECT_EQ(reduce_two<int64_t>(DType::kI64, ReduceOp::kProduct, most, 3), most - 2);
  const std::vector<uint8_t> values(5, 255);
  std::vector<const void*> srcs;
  for (const uint8_t& value : values) srcs.push_back(&value);
  uint8_t product = 0;
  reduce(DType::kU8, ReduceOp::kProduct, &product, srcs.data(), 5, 1, {});
  EXPECT_EQ(product, 255);  // (-1)^5 mod 256
}

TEST(Reduce, IntegersTruncateTowardZero) {
  for (const int32_t x : {7, -7}) {
    int32_t data = x;
    scale(DType::kI32, &data, 1, 0.5);
    EXPECT_EQ(data, x / 2);
    const void* srcs[] = {&x};
    reduce(DType::kI32, ReduceOp::kAverage, &data, srcs, 1, 1, Finish{2, 1});
    EXPECT_EQ(data, x / 2);
  }
}

TEST_P(EveryType, DotsAndCombineLikeAPlainLoop) {
  if (!is_float(dtype())) return;  // Adasum takes nothing else
  dispatch(dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using O = Oracle<T>;
    if constexpr (std::is_floating_point_v<typename O::Wide>) {
      for (const int64_t count : kCounts) {
        std::mt19937 random(3);
        std::vector<T> a(static_cast<size_t>(count)), b(a.size()), expected(a.size());
        Dots sums;
        for (size_t i = 0; i < a.size(); ++i) {
          a[i] = number<T>(random);
          b[i] = number<T>(random);
          const double x = static_cast<double>(O::widen(a[i])),
                       y = static_cast<double>(O::widen(b[i]));
          sums.ab += x * y;
          sums.aa += x * x;
          sums.bb += y * y;
          expected[i] = O::narrow(static_cast<typename O::Wide>(0.25 * x + 0.75 * y));
        }
        const Dots found = dots(dtype(), a.data(), b.data(), count);
        EXPECT_DOUBLE_EQ(found.ab, sums.ab);
        EXPECT_DOUBLE_EQ(found.aa, sums.aa);
        EXPECT_DOUBLE_EQ(found.bb, sums.bb);
        combine(dtype(), a.data(), b.data(), 0.25, 0.75, count);
        for (size_t i = 0; i < a.size(); ++i) ASSERT_TRUE(same_bits(a[i], expected[i])) << i;
      }
    }
  });
}

}  // namespace
}  // namespace bagua
