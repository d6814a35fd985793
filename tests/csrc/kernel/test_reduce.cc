// Every element type, reduction and instruction set, against a plain loop over one element at a
// time: every tail, wherever rows begin, and nothing is written beside them.
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
#include "kernel/plain_reduce.h"
#include "kernel/row.h"
#include "kernel/stream.h"

namespace bagua {
namespace {

// A reduction of so many sources, how it is done and what has to come out.
template <class T>
class Reduction {
 public:
  using O = Oracle<T>;
  static constexpr size_t kLine = kLineNbytes / sizeof(T);

  Reduction(DType dtype, ReduceOp op, int nsrcs, Finish finish, int64_t most)
      : dtype_(dtype), op_(op), nsrcs_(nsrcs), finish_(finish), expected_(new T[most]) {
    std::mt19937 random(static_cast<unsigned>(most * 31 + nsrcs));
    // A product of any integers leaves the accumulators, which shows when it is scaled.
    const bool any = op != ReduceOp::kProduct || finish.identity();
    for (int s = 0; s < nsrcs; ++s) {
      values_.emplace_back(new T[most]);
      std::generate_n(values_.back().get(), most,
                      [&] { return any ? any_number<T>(random) : number<T>(random); });
    }
    for (int64_t i = 0; i < most; ++i) {
      auto x = O::widen(values_[0][i]);
      for (int s = 1; s < nsrcs; ++s) x = plain_op(op, x, O::widen(values_[s][i]));
      expected_[i] = O::narrow(plain_finish<T>(x, finish));
    }
    for (int i = 0; i < nsrcs + 2; ++i)
      rows_.emplace_back(static_cast<size_t>(most) * sizeof(T), static_cast<char>(0xa5 - 7 * i));
  }

  // `into`: which source is also the first target, -1 for none. offsets: where in a line, in
  // elements, the two targets and then the sources begin.
  struct How {
    Isa isa;
    int64_t count;
    std::vector<size_t> offsets;
    int into = -1, ntargets = 1, streamed = 0;
  };
  How apart(Isa isa, int64_t count) const {
    How how{isa, count, std::vector<size_t>(static_cast<size_t>(nsrcs_) + 2)};
    return how;
  }
  How any_way(Isa isa, int64_t count, std::mt19937& random) const {
    How how = apart(isa, count);
    for (size_t& offset : how.offsets) offset = random() % kLine;
    how.into = static_cast<int>(random() % (nsrcs_ + 1)) - 1;
    how.ntargets = 1 + static_cast<int>(random() % 2);
    how.streamed = static_cast<int>(random() % (how.ntargets + 1));
    return how;
  }

  void check(const How& how) {
    const size_t nbytes = static_cast<size_t>(how.count) * sizeof(T);
    const auto place = [&](int row, const void* content) {
      return rows_[row].place(how.offsets[row] * sizeof(T), content, nbytes);
    };
    std::vector<const void*> srcs;
    for (int s = 0; s < nsrcs_; ++s) srcs.push_back(place(2 + s, values_[s].get()));
    const int first = how.into < 0 ? 0 : 2 + how.into;
    if (how.into < 0) place(0, expected_.get()), std::memset(rows_[0].at(), 0x5a, nbytes);
    place(1, rows_[first].at());
    void* targets[] = {rows_[first].at(), rows_[1].at()};
    reduce(dtype_, op_, {targets, how.ntargets, how.streamed}, srcs.data(), nsrcs_, how.count,
           finish_, how.isa);
    stream_fence();
    for (int t = 0; t < how.ntargets; ++t) check(rows_[t == 0 ? first : 1], how);
  }

 private:
  void check(const Row& row, const How& how) const {
    const auto told = [&] {
      std::string text = std::string(dtype_name(dtype_)) + " " + op_name(op_) + " of " +
                         std::to_string(nsrcs_) + ", " + isa_name(how.isa) + ", " +
                         std::to_string(how.count) + " elements, into " + std::to_string(how.into) +
                         ", " + std::to_string(how.ntargets) + " targets, " +
                         std::to_string(how.streamed) + " streamed, at";
      for (const size_t offset : how.offsets) text += " " + std::to_string(offset);
      return text;
    };
    ASSERT_TRUE(row.intact_around()) << told();
    if (row.is(expected_.get())) return;
    const T* found = reinterpret_cast<const T*>(row.at());
    for (int64_t i = 0; i < how.count; ++i)
      ASSERT_TRUE(same(found[i], expected_[i])) << told() << ": differs at " << i;
  }

  DType dtype_;
  ReduceOp op_;
  int nsrcs_;
  Finish finish_;
  std::vector<std::unique_ptr<T[]>> values_;
  std::unique_ptr<T[]> expected_;
  std::vector<Row> rows_;  // of the two targets, then of the sources
};

class EveryType : public testing::TestWithParam<int> {
 protected:
  DType dtype() const { return static_cast<DType>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Reduce, EveryType, testing::Range(0, kDTypeCount), [](const auto& info) {
  return dtype_name(static_cast<DType>(info.param));
});

// Calls back with every reduction of up to four sources, for every instruction set.
template <class F>
void for_each_reduction(DType dtype, int64_t most, F&& f) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::mt19937 random(7);
    for (const ReduceOp op :
         {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct})
      for (const Finish finish : {Finish{}, Finish{1, 0.5}, Finish{3, 2.5}, Finish{4, 1},
                                  Finish{2, -0.2}, Finish{1, -3e5}}) {
        const bool finishes = dtype != DType::kBool && (is_linear(op) || finish.divisor == 1);
        if (!meaningful(dtype, op) || (!finish.identity() && !finishes)) continue;
        for (int nsrcs = 1; nsrcs <= 4; ++nsrcs) {
          Reduction<T> reduction(dtype, op, nsrcs, finish, most);
          for (int isa = 0; isa < kIsaCount; ++isa) {
            if (has_isa(static_cast<Isa>(isa))) f(reduction, static_cast<Isa>(isa), random);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
  });
}

TEST_P(EveryType, ReducesLikeAPlainLoop) {
  for_each_reduction(dtype(), 130, [](auto& reduction, Isa isa, std::mt19937& random) {
    for (int64_t count = 0; count <= 130; ++count)
      for (int i = 0; i < 2; ++i) reduction.check(reduction.any_way(isa, count, random));
  });
}

TEST_P(EveryType, ReducesWhereverARowBegins) {
  for_each_reduction(dtype(), 130, [](auto& reduction, Isa isa, std::mt19937&) {
    for (const int64_t count : {1, 17, 66, 130}) {
      auto how = reduction.apart(isa, count);
      for (size_t& offset : how.offsets) {
        for (offset = 1; offset < reduction.kLine; ++offset) reduction.check(how);
        offset = 0;
      }
    }
  });
}

// 512 elements are a block, and 256 complex numbers.
TEST_P(EveryType, ReducesAroundTheEdgesOfBlocks) {
  for_each_reduction(dtype(), 4097, [](auto& reduction, Isa isa, std::mt19937& random) {
    for (const int64_t count : {255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 4097})
      reduction.check(reduction.any_way(isa, count, random));
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

// Whichever source it is in, wherever in a block, and where a source is a target, too.
template <class T>
void tell_odd_sources(DType dtype, T one, const std::vector<T>& odd_values) {
  constexpr int64_t kCount = 1100;
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (!has_isa(isa)) continue;
    for (const int nsrcs : {1, 2, 3, 5})
      for (int from = -1; from < nsrcs; ++from)
        for (const int64_t at : {0, 511, 512, 1099})
          for (const T odd_value : odd_values) {
            std::vector<std::vector<T>> values(static_cast<size_t>(nsrcs),
                                               std::vector<T>(kCount, one));
            if (from >= 0) values[static_cast<size_t>(from)][static_cast<size_t>(at)] = odd_value;
            std::vector<const void*> srcs;
            for (const auto& source : values) srcs.push_back(source.data());
            OddSources odd;
            reduce(dtype, ReduceOp::kSum, values[0].data(), srcs.data(), nsrcs, kCount,
                   Finish{static_cast<double>(nsrcs), 1}, isa, &odd);
            ASSERT_EQ(odd.any(), from >= 0);
            for (int s = 0; s < nsrcs; ++s) ASSERT_EQ(odd.has(s), s == from) << nsrcs;
          }
  }
}

TEST(Reduce, TellsWhichSourcesAreNoNumbers) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> odd = {inf, -inf, std::numeric_limits<float>::quiet_NaN()};
  tell_odd_sources<float>(DType::kF32, 1, odd);
  tell_odd_sources<double>(DType::kF64, 1, {odd.begin(), odd.end()});
  std::vector<F16> halves;
  std::vector<BF16> bfloats;
  for (const float x : odd) {
    halves.push_back(to_f16(x));
    bfloats.push_back(to_bf16(x));
  }
  tell_odd_sources<F16>(DType::kF16, to_f16(1), halves);
  tell_odd_sources<BF16>(DType::kBF16, to_bf16(1), bfloats);
}

TEST(Reduce, TellsThatASumIsTooLarge) {
  std::vector<float> a(600, 3e38f), b(600, 3e38f);
  const void* srcs[] = {a.data(), b.data()};
  OddSources odd;
  reduce(DType::kF32, ReduceOp::kSum, a.data(), srcs, 2, 600, {}, best_isa(), &odd);
  EXPECT_TRUE(odd.any());
  EXPECT_FALSE(odd.has(0) || odd.has(1));
  std::vector<int32_t> ints(600, 0x7f800000);  // which as a float is Inf
  const void* sources[] = {ints.data(), ints.data()};
  OddSources none;
  reduce(DType::kI32, ReduceOp::kMax, ints.data(), sources, 2, 600, {}, best_isa(), &none);
  EXPECT_FALSE(none.any());
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

template <class T>
T scaled(DType dtype, T x, double factor) {
  scale(dtype, &x, 1, factor);
  return x;
}

TEST(Reduce, IntegersAreDividedExactly) {
  const int64_t x = (int64_t{1} << 54) + 2, most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(scaled(DType::kI64, x, 0.5), x / 2);
  EXPECT_EQ(scaled(DType::kI64, -x, 0.125), -x / 8);
  EXPECT_EQ(scaled(DType::kI64, most, 1.0 / 3), most / 3);
  EXPECT_EQ(scaled(DType::kI64, most, -0.1), -(most / 10));
  EXPECT_EQ(scaled<int64_t>(DType::kI64, 49, 1.0 / 49), 1);
  EXPECT_EQ(scaled<int8_t>(DType::kI8, 98, 1.0 / 49), 2);
  const void* srcs[] = {&x, &x, &x, &x};
  int64_t result = 0;
  reduce(DType::kI64, ReduceOp::kAverage, &result, srcs, 3, 1, Finish{3, 0.5});
  EXPECT_EQ(result, x / 2);
}

TEST(Reduce, ScaledIntegersAreWithinTheirType) {
  const int32_t half = int32_t{1} << 30;
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!has_isa(static_cast<Isa>(isa))) continue;
    std::vector<int32_t> a(100, half), sums(100);
    const void* srcs[] = {a.data(), a.data()};
    const auto check = [&](double factor, int32_t expected) {
      reduce(DType::kI32, ReduceOp::kSum, sums.data(), srcs, 2, 100, Finish{1, factor},
             static_cast<Isa>(isa));
      EXPECT_EQ(sums, std::vector<int32_t>(100, expected)) << factor;
    };
    check(0.25, half / 2);  // the sum itself does not have to fit
    check(4.0, std::numeric_limits<int32_t>::max());
    check(-4.0, std::numeric_limits<int32_t>::min());
    check(1e300, std::numeric_limits<int32_t>::max());
  }
  using L = std::numeric_limits<int64_t>;
  EXPECT_EQ(scaled<int64_t>(DType::kI64, L::max() / 2, 4.0), L::max());
  EXPECT_EQ(scaled<int64_t>(DType::kI64, L::max() / 2, -4.0), L::min());
  EXPECT_EQ(scaled<int64_t>(DType::kI64, L::min(), -1.0), L::max());
  EXPECT_EQ(scaled<int64_t>(DType::kI64, L::max(), 1e308), L::max());
  EXPECT_EQ(scaled<uint8_t>(DType::kU8, 100, 2.555), 255);
  EXPECT_EQ(scaled<uint8_t>(DType::kU8, 100, 3), 255);
  EXPECT_EQ(scaled<uint8_t>(DType::kU8, 100, -1), 0);
  EXPECT_EQ(scaled<int8_t>(DType::kI8, -100, 2), -128);
  EXPECT_EQ(scaled<int16_t>(DType::kI16, 300, 1e5), 32767);
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

TEST(Reduce, PowersOfTwoHaveAnExactInverse) {
  std::mt19937 random(7);
  for (const float divisor : {1.0f, 2.0f, 0.5f, 8.0f, 1024.0f, 0x1p126f, 0x1p-126f, -4.0f}) {
    const auto inverse = static_cast<float>(exact_inverse(divisor));
    if (divisor < 0) {
      EXPECT_EQ(inverse, 0);
      continue;
    }
    for (int i = 0; i < 1 << 14; ++i) {
      const float x = bits_float(static_cast<uint32_t>(random()));
      if (std::isnan(x)) continue;
      ASSERT_EQ(float_bits(x * inverse), float_bits(x / divisor)) << x;
    }
  }
  for (const float divisor : {3.0f, 6.0f, 0.0f, 0x1p127f, 0x1p-140f, INFINITY, NAN})
    EXPECT_EQ(exact_inverse(divisor), 0) << divisor;
}

}  // namespace
}  // namespace bagua
