// Every piece is done once, whoever does it.
#include "common/crew.h"

#include <gtest/gtest.h>

#include <vector>

namespace bagua {
namespace {

class EveryCrew : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Crew, EveryCrew, testing::Values(0, 1, 3, 7));

TEST_P(EveryCrew, DoesAllOfTheWorkOnce) {
  Crew crew(GetParam());
  for (const int64_t count : {0, 1, 99, 100, 101, 100000}) {
    for (int again = 0; again < 50; ++again) {
      std::vector<int> done(static_cast<size_t>(count));
      crew.share(count, 100, [&](int64_t begin, int64_t n) {
        ASSERT_LE(begin + n, count);
        for (int64_t i = begin; i < begin + n; ++i) ++done[static_cast<size_t>(i)];
      });
      for (const int times : done) ASSERT_EQ(times, 1);
    }
  }
}

TEST_P(EveryCrew, EndsWithoutWork) { Crew crew(GetParam()); }

}  // namespace
}  // namespace bagua
