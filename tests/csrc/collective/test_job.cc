#include <gtest/gtest.h>

#include <vector>

#include "collective/jobs.h"

namespace bagua {
namespace {

struct Lookout : YieldingWaiter {
  int looks = 0;
  void look() override { ++looks; }
};

// Else a rank that is busy for long would be taken for dead.
TEST(LongWork, LooksAroundNowAndThen) {
  constexpr int64_t kCount = 24 << 20;
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

}  // namespace
}  // namespace bagua
