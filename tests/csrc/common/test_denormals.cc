// A thread that takes denormal numbers for zeros computes with them meanwhile.
#include "common/denormals.h"

#include <gtest/gtest.h>

#include <limits>

namespace bagua {
namespace {

// Behind a pointer, or compilers would compute it before the thread is told anything.
float doubled_tiny(float x) { return x + x; }
float (*volatile double_tiny)(float) = doubled_tiny;

#if defined(__x86_64__)
TEST(Denormals, AreNoZerosMeanwhile) {
  const float tiny = std::numeric_limits<float>::min() / 8;
  const uint32_t before = _mm_getcsr();
  for (const uint32_t flushes : {1u << 15 | 1u << 6, 1u << 15, 1u << 6}) {
    _mm_setcsr(before | flushes);
    EXPECT_EQ(double_tiny(tiny), 0);
    {
      const Denormals denormals;
      EXPECT_EQ(double_tiny(tiny), std::numeric_limits<float>::min() / 4);
      const Denormals again;
    }
    EXPECT_EQ(double_tiny(tiny), 0);
  }
  _mm_setcsr(before);
}
#endif

TEST(Denormals, AreNoZerosWhereNothingFlushesThem) {
  const Denormals denormals;
  EXPECT_GT(double_tiny(std::numeric_limits<float>::denorm_min()), 0);
}

}  // namespace
}  // namespace bagua
