// Conversions of 16-bit floats, against arithmetic in double that knows nothing of bit tricks.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernel/half.h"
#include "kernel/row.h"

namespace bagua {
namespace {

struct Format {
  int exponent_bits;
  int mantissa_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int least_exponent() const { return 1 - bias(); }
};
constexpr Format kF16{5, 10}, kBF16{8, 7};

// The value of a pattern, by the definition of the format.
double value_of(Format f, uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = (bits & 0x7fff) >> f.mantissa_bits;
  const int mantissa = bits & ((1 << f.mantissa_bits) - 1);
  if (exponent == (1 << f.exponent_bits) - 1)
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  const double fraction = std::ldexp(mantissa, -f.mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, f.least_exponent())
                               : std::ldexp(1 + fraction, exponent - f.bias()));
}

// Round to nearest even, in double: steps of the exponent's size.
double rounded(Format f, double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), f.least_exponent());
  const double step = std::ldexp(1, exponent - f.mantissa_bits);
  const double y = std::nearbyint(x / step) * step;
  const double limit = std::ldexp(1, f.bias() + 1);
  return std::fabs(y) >= limit ? std::copysign(std::numeric_limits<double>::infinity(), x) : y;
}

template <class Half>
Half from_float(float x);
template <>
F16 from_float(float x) {
  return to_f16(x);
}
template <>
BF16 from_float(float x) {
  return to_bf16(x);
}

template <class Half>
void every_pattern_survives(Format format) {
  for (int i = 0; i <= 0xffff; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const double expected = value_of(format, bits);
    const float x = to_float(Half{bits});
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(x)) << std::hex << i;
      ASSERT_TRUE(std::isnan(value_of(format, from_float<Half>(x).bits))) << std::hex << i;
      ASSERT_EQ(from_float<Half>(x).bits & 0x8000, i & 0x8000) << std::hex << i;
      continue;
    }
    ASSERT_EQ(x, expected) << std::hex << i;
    ASSERT_EQ(std::signbit(x), std::signbit(expected)) << std::hex << i;
    ASSERT_EQ(from_float<Half>(x).bits, bits) << std::hex << i;
  }
}

TEST(Half, EveryF16PatternSurvives) { every_pattern_survives<F16>(kF16); }
TEST(Half, EveryBF16PatternSurvives) { every_pattern_survives<BF16>(kBF16); }

template <class Half>
void expect_rounded(Format format, float x) {
  const uint16_t bits = from_float<Half>(x).bits;
  const double y = value_of(format, bits);
  if (std::isnan(x)) {
    EXPECT_TRUE(std::isnan(y)) << std::hexfloat << x;
    return;
  }
  EXPECT_EQ(y, rounded(format, x)) << std::hexfloat << x;
  EXPECT_EQ((bits & 0x8000) != 0, std::signbit(x)) << std::hexfloat << x;
}

// Around every value a half can have and every tie between two of them.
template <class Half>
void rounds_around_every_value_and_tie(Format format) {
  const uint16_t infinity =
      static_cast<uint16_t>(((1 << format.exponent_bits) - 1) << format.mantissa_bits);
  for (uint16_t bits = 0; bits < infinity; ++bits) {
    const double low = value_of(format, bits);
    const auto next = static_cast<uint16_t>(bits + 1);
    const double high =
        next == infinity ? std::ldexp(1, format.bias() + 1) : value_of(format, next);
    for (const double x : {low, (low + high) / 2}) {
      const auto center = static_cast<float>(x);
      for (const float y : {std::nextafter(center, 0.0f), center, std::nextafter(center, INFINITY)})
        for (const float z : {y, -y}) expect_rounded<Half>(format, z);
    }
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Half, F16RoundsToNearestEven) { rounds_around_every_value_and_tie<F16>(kF16); }
TEST(Half, BF16RoundsToNearestEven) { rounds_around_every_value_and_tie<BF16>(kBF16); }

TEST(Half, FloatsFromEverywhere) {
  std::vector<float> floats = {0.0f, INFINITY, NAN, 65504.0f, 65519.99f, 65520.0f, 3.4e38f};
  floats.push_back(std::numeric_limits<float>::denorm_min());
  floats.push_back(std::numeric_limits<float>::min());
  floats.push_back(std::numeric_limits<float>::max());
  floats.push_back(bits_float(0x7f800001u));  // a NaN whose upper mantissa bits are all zero
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) floats.push_back(bits_float(random()));
  for (const float x : floats) {
    expect_rounded<F16>(kF16, x);
    expect_rounded<F16>(kF16, -x);
    expect_rounded<BF16>(kBF16, x);
    expect_rounded<BF16>(kBF16, -x);
    if (HasFailure()) return;
  }
}

// Every float16 and bfloat16, and back, and what lies between, with each instruction set.
TEST(Half, ArraysAreConvertedLikeSingleValues) {
  std::vector<uint16_t> all(1 << 16);
  std::iota(all.begin(), all.end(), uint16_t{0});
  for (int i = 0; i < kIsaCount; ++i) {
    const auto isa = static_cast<Isa>(i);
    if (!has_isa(isa)) continue;
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      std::vector<float> wide(all.size());
      std::vector<uint16_t> back(all.size());
      widen(dtype, wide.data(), all.data(), static_cast<int64_t>(all.size()), isa);
      narrow(dtype, back.data(), wide.data(), static_cast<int64_t>(all.size()), isa);
      for (size_t j = 0; j < all.size(); ++j) {
        const bool half = dtype == DType::kF16;
        const float one = half ? to_float(F16{all[j]}) : to_float(BF16{all[j]});
        ASSERT_EQ(float_bits(wide[j]), float_bits(one)) << isa_name(isa) << " " << j;
        const uint16_t narrowed = half ? to_f16(one).bits : to_bf16(one).bits;
        ASSERT_EQ(back[j], narrowed) << isa_name(isa) << " " << j;
      }
      // Ties, and what is next to them, on either side.
      for (const uint32_t past : {0xfffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
        std::vector<float> between(wide.size());
        for (size_t j = 0; j < wide.size(); ++j)
          between[j] = bits_float(float_bits(wide[j]) + past);
        narrow(dtype, back.data(), between.data(), static_cast<int64_t>(between.size()), isa);
        for (size_t j = 0; j < all.size(); ++j) {
          const bool half = dtype == DType::kF16;
          const uint16_t one = half ? to_f16(between[j]).bits : to_bf16(between[j]).bits;
          ASSERT_EQ(back[j], one) << isa_name(isa) << " " << j << " and " << past;
        }
      }
    }
  }
}

// Every count below a few vectors, wherever the two arrays begin, and nothing is written beside
// them.
TEST(Half, ArraysOfAnyLengthAnywhere) {
  constexpr int64_t kMost = 130;
  constexpr size_t kFloats = kLineNbytes / sizeof(float), kHalves = kLineNbytes / sizeof(uint16_t);
  std::mt19937 random(2);
  std::vector<uint16_t> halves(kMost), narrowed(kMost);
  std::vector<float> floats(kMost), widened(kMost);
  const std::vector<char> nothing(kMost * sizeof(float), '\x5a');
  Row half_row(kMost * sizeof(uint16_t)), float_row(kMost * sizeof(float));
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const bool f16 = dtype == DType::kF16;
    for (size_t i = 0; i < kMost; ++i) {
      halves[i] = static_cast<uint16_t>(random());
      floats[i] = bits_float(random());
      widened[i] = f16 ? to_float(F16{halves[i]}) : to_float(BF16{halves[i]});
      narrowed[i] = f16 ? to_f16(floats[i]).bits : to_bf16(floats[i]).bits;
    }
    for (int i = 0; i < kIsaCount; ++i) {
      const auto isa = static_cast<Isa>(i);
      if (!has_isa(isa)) continue;
      for (int64_t count = 0; count <= kMost; ++count)
        for (size_t at = 0; at < kFloats + kHalves; ++at) {  // each row once at every place
          const size_t half_at = (at < kFloats ? random() % kHalves : at - kFloats) * 2;
          const size_t float_at = (at < kFloats ? at : random() % kFloats) * 4;
          const auto n = static_cast<size_t>(count);
          const auto place_halves = [&](const void* x) {
            return half_row.place(half_at, x, n * 2);
          };
          const auto place_floats = [&](const void* x) {
            return reinterpret_cast<float*>(float_row.place(float_at, x, n * 4));
          };
          const auto told = [&] {
            return std::string(dtype_name(dtype)) + ", " + isa_name(isa) + ", " +
                   std::to_string(count) + " at " + std::to_string(half_at) + " and " +
                   std::to_string(float_at);
          };
          widen(dtype, place_floats(nothing.data()), place_halves(halves.data()), count, isa);
          ASSERT_TRUE(float_row.is(widened.data()) && float_row.intact_around()) << told();
          narrow(dtype, place_halves(nothing.data()), place_floats(floats.data()), count, isa);
          ASSERT_TRUE(half_row.is(narrowed.data()) && half_row.intact_around()) << told();
        }
    }
  }
}

}  // namespace
}  // namespace bagua
