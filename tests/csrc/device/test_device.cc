#include "device/device.h"

#include <gtest/gtest.h>

#include "common/errors.h"
#include "device/pretend.h"

namespace bagua {
namespace {

constexpr size_t kMB = 1 << 20;

TEST(Device, WhatIsLentIsThereForTheNextTime) {
  PretendDevice device(0);
  for (const size_t nbytes : {4 * kMB, 3 * kMB, 4 * kMB}) device.lend(nbytes);
  EXPECT_EQ(device.allocations(), 1);
}

// What was lent before is too small, and of more there is no room beside it.
TEST(Device, WhatNobodyHasBorrowedMakesRoom) {
  PretendDevice device(0);
  device.has(8 * kMB);
  for (const size_t nbytes : {kMB, 2 * kMB, 3 * kMB}) device.lend(nbytes);
  EXPECT_NE(device.lend(7 * kMB), nullptr);
  const auto all = device.lend(7 * kMB);
  EXPECT_THROW(device.lend(2 * kMB), UsageError);
  EXPECT_NE(device.lend(kMB), nullptr);
}

}  // namespace
}  // namespace bagua
