#include "common/ranks_text.h"

#include <gtest/gtest.h>

namespace bagua {
namespace {

TEST(RanksText, CountsThem) {
  EXPECT_EQ(ranks_text({3}), "rank 3");
  EXPECT_EQ(ranks_text({0, 3}), "ranks 0, 3");
}

}  // namespace
}  // namespace bagua
