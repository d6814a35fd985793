// What Adasum is made of, against a plain loop: every float, instruction set and tail, wherever the
// two arrays begin.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "kernel/plain_reduce.h"
#include "kernel/reduce.h"
#include "kernel/row.h"

namespace bagua {
namespace {

// Two arrays with all that comes of them.
template <class T>
struct Pair {
  using O = Oracle<T>;
  static constexpr double ca = 0.25, cb = -0.75;

  explicit Pair(size_t most) : a(most), b(most), combined(most) {
    std::mt19937 random(3);
    for (size_t i = 0; i < most; ++i) {
      a[i] = number<T>(random);
      b[i] = number<T>(random);
      const double sum = ca * value(a[i]) + cb * value(b[i]);
      combined[i] = O::narrow(static_cast<typename O::Wide>(sum));
    }
  }
  static double value(T x) { return static_cast<double>(O::widen(x)); }
  Dots sums(int64_t count) const {
    Dots d;
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      d.ab += value(a[i]) * value(b[i]);
      d.aa += value(a[i]) * value(a[i]);
      d.bb += value(b[i]) * value(b[i]);
    }
    return d;
  }
  std::vector<T> a, b, combined;
};

template <class T>
void check_every_tail(DType dtype) {
  constexpr size_t kMost = 4097, kLine = kLineNbytes / sizeof(T);
  const Pair<T> pair(kMost);
  std::vector<int64_t> counts(131);
  std::iota(counts.begin(), counts.end(), 0);
  counts.insert(counts.end(), {2047, 2048, 2049, 4097});
  Row a(kMost * sizeof(T)), b(kMost * sizeof(T), '\x3c');
  for (const int64_t count : counts) {
    const size_t nbytes = static_cast<size_t>(count) * sizeof(T);
    const Dots sums = pair.sums(count);
    const Dots baseline = dots(dtype, pair.a.data(), pair.b.data(), count, Isa::kBaseline);
    for (size_t at = 0; at < 2 * kLine; ++at)  // each array once at every place
      for (int i = 0; i < kIsaCount; ++i) {
        const auto isa = static_cast<Isa>(i);
        if (!has_isa(isa)) continue;
        SCOPED_TRACE(std::string(isa_name(isa)) + ", " + std::to_string(count) + " elements, " +
                     std::to_string(at));
        a.place(at % kLine * sizeof(T), pair.a.data(), nbytes);
        b.place((at < kLine ? at * 7 % kLine : 0) * sizeof(T), pair.b.data(), nbytes);
        const Dots found = dots(dtype, a.at(), b.at(), count, isa);
        ASSERT_NEAR(found.ab, sums.ab, 1e-9);
        ASSERT_NEAR(found.aa, sums.aa, 1e-9);
        ASSERT_NEAR(found.bb, sums.bb, 1e-9);
        ASSERT_EQ(std::memcmp(&found, &baseline, sizeof found), 0);
        combine(dtype, a.at(), b.at(), pair.ca, pair.cb, count, isa);
        ASSERT_TRUE(a.is(pair.combined.data()) && a.intact_around());
        ASSERT_TRUE(b.is(pair.b.data()) && b.intact_around());
      }
  }
}

TEST(Dots, F16LikeAPlainLoop) { check_every_tail<F16>(DType::kF16); }
TEST(Dots, BF16LikeAPlainLoop) { check_every_tail<BF16>(DType::kBF16); }
TEST(Dots, F32LikeAPlainLoop) { check_every_tail<float>(DType::kF32); }
TEST(Dots, F64LikeAPlainLoop) { check_every_tail<double>(DType::kF64); }

}  // namespace
}  // namespace bagua
