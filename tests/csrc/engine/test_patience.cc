#include "engine/patience.h"

#include <gtest/gtest.h>

namespace bagua {
namespace {

TEST(Patience, SpinsTwiceAsLongAsAShortWaitTook) {
  Patience patience(50);
  EXPECT_EQ(patience.spin_us(), 50);
  patience.waited(200);
  EXPECT_EQ(patience.spin_us(), 400);
  patience.waited(60);
  EXPECT_EQ(patience.spin_us(), 120);
}

TEST(Patience, KeepsBetweenTheLeastAndAMillisecond) {
  Patience patience(50);
  patience.waited(1);
  EXPECT_EQ(patience.spin_us(), 50);
  patience.waited(999);
  EXPECT_EQ(patience.spin_us(), 1000);
}

TEST(Patience, ALongWaitIsForgotten) {
  Patience patience(50);
  patience.waited(400);
  patience.waited(1000);
  EXPECT_EQ(patience.spin_us(), 50);
}

TEST(Patience, OfNothingNeverSpins) {
  Patience patience(0);
  patience.waited(10);
  EXPECT_EQ(patience.spin_us(), 0);
}

}  // namespace
}  // namespace bagua
