#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "collective/jobs.h"
#include "common/scaled.h"
#include "kernel/half.h"

namespace bagua {
namespace {

struct Lookout : YieldingWaiter {
  int looks = 0;
  void look() override { ++looks; }
};

// Else a rank that is busy for long would be taken for dead.
TEST(LongWork, LooksAroundNowAndThen) {
  constexpr int64_t kCount = scaled(24 << 20);
  LoopbackHub hub(1);
  const auto transport = hub.connect(0);
  Lookout lookout;
  Group group(*transport, lookout, {0}, 0);
  Scratch scratch;
  Job job{group, scratch, DType::kF32};
  std::vector<float> ones(kCount, 1), sums(kCount);
  copy(group, sums.data(), ones.data(), kCount * sizeof(float));
  EXPECT_EQ(lookout.looks, 1);
  Crew helpers(1);
  for (Crew* crew : {static_cast<Crew*>(nullptr), &helpers}) {
    job.crew = crew;
    const void* srcs[] = {sums.data(), ones.data()};
    job.reduce(sums.data(), srcs, 2, kCount, {});
  }
  EXPECT_EQ(lookout.looks, 4);
  EXPECT_EQ(sums, std::vector<float>(kCount, 3));
}

// Parts of it may be others' work.
TEST(LongWork, OfSixteenBitFloatsIsLikeAnyOther) {
  constexpr int64_t kCount = scaled(24 << 20) + 7;
  LoopbackHub hub(1);
  const auto transport = hub.connect(0);
  std::vector<F16> a(kCount, to_f16(2048)), b(kCount, to_f16(1)), rounded(kCount);
  std::vector<float> sums(kCount);
  Crew helpers(1);
  for (Crew* crew : {static_cast<Crew*>(nullptr), &helpers}) {
    Lookout lookout;
    Group group(*transport, lookout, {0}, 0);
    Scratch scratch;
    Job job{group, scratch, DType::kF16};
    job.crew = crew;
    const void* srcs[] = {a.data(), b.data(), b.data()};
    job.reduce_wide(sums.data(), srcs, 3, kCount, 0.5);
    EXPECT_EQ(group.work().touched_nbytes, kCount * (3 * 2 + 4));
    EXPECT_EQ(lookout.looks, 1);
    job.narrow(rounded.data(), sums.data(), kCount);
    EXPECT_EQ(group.work().touched_nbytes, kCount * (3 * 2 + 4 + 4 + 2));
    EXPECT_EQ(sums, std::vector<float>(kCount, 1025));
    for (const F16 x : rounded) ASSERT_EQ(to_float(x), 1025);
    std::fill(sums.begin(), sums.end(), 0.0f);
  }
}

}  // namespace
}  // namespace bagua
