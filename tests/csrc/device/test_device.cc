#include "device/device.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "common/errors.h"
#include "device/pretend.h"
#include "ranks.h"

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

// Asked how far it is, which takes it a while.
struct AskedDevice : PretendDevice {
  AskedDevice() : PretendDevice(0) {}
  bool reached(const Mark& mark) override {
    ++asked;
    return PretendDevice::reached(mark);
  }
  int asked = 0;
};

TEST(Device, IsAskedAFewTimesHoweverMuchIsKept) {
  constexpr int kMany = 1000;
  AskedDevice device;
  const Device::Stream held = device.add_stream(), free = device.add_stream();
  std::atomic<bool> go{false};
  device.run(held, [&go] {
    while (!go) std::this_thread::yield();
  });
  int alive = 0;
  const auto keep = [&](Device::Stream stream) {
    ++alive;
    device.keep_until(device.mark(stream), std::shared_ptr<int>(&alive, [](int* p) { --*p; }));
  };
  for (int i = 0; i < kMany; ++i) keep(held);
  EXPECT_LE(device.asked, 8 * kMany);
  EXPECT_EQ(alive, kMany);
  keep(free);
  device.drain(free);
  for (int i = 0; i < kMany && alive > kMany; ++i) device.let_go();
  EXPECT_EQ(alive, kMany) << "what is reached goes, whatever is not";
  go = true;
  device.drain(held);
  device.let_go();
  EXPECT_EQ(alive, 0);
}

// Whatever another thread of the parent's was in the middle of.
TEST(Device, OfAParentKeepsNoChildWaiting) {
  struct SlowDevice : PretendDevice {
    SlowDevice() : PretendDevice(0) {}
    bool reached(const Mark&) override {
      asked = true;
      while (!go) std::this_thread::yield();
      return true;
    }
    std::atomic<bool> asked{false}, go{false};
  } device;
  const Device::Mark mark = device.mark(device.add_stream());
  auto lent = device.lend(100);
  std::thread keeps([&] { device.keep_until(mark, std::make_shared<int>()); });
  while (!device.asked) std::this_thread::yield();
  const int child = ::fork();
  if (child == 0) {
    ::alarm(kHangS);
    device.keep_until(mark, std::make_shared<int>());
    lent.reset();
    ::_exit(0);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  device.go = true;
  keeps.join();
}

TEST(Device, IsNotAskedWhatGraphsMayDoAgain) {
  AskedDevice device;
  const Device::Stream stream = device.add_stream();
  const auto graph = device.capture(stream);
  const auto owner = std::make_shared<int>();
  device.keep_until(device.mark(stream), owner);
  PretendDevice::end(*graph);
  device.asked = 0;
  device.let_go();
  EXPECT_EQ(device.asked, 0);
  EXPECT_EQ(owner.use_count(), 2);
}

}  // namespace
}  // namespace bagua
