// Exchanges that begin while those before them still wait.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "engine/loopback_world.h"

namespace bagua {
namespace {

constexpr size_t kLargeCount = 300'000;  // large enough to be agreed on during an exchange

struct Kind {
  const char* name;
  const char* codec;
};

class Ahead : public testing::TestWithParam<Kind> {
 protected:
  // Ranks by themselves, whose gates are shut.
  Ahead() : handles(3), world(3) { open_gates(world, 0); }
  // Submits one more on every rank. All but two values are zeros: a codec that keeps few loses
  // none.
  void submit(int number) {
    for (int rank = 0; rank < world.size(); ++rank) {
      auto& mine = data.emplace_back(kLargeCount);
      mine.front() = static_cast<float>(rank);
      mine.back() = static_cast<float>(number);
      auto request = allreduce_of("x" + std::to_string(number), mine);
      request->description.codec = GetParam().codec;
      handles[static_cast<size_t>(rank)].push_back(
          world[rank].submit(std::move(request), Urgency::kNow));
    }
  }
  void wait_until_begun(int64_t exchanges) {
    for (int rank = 0; rank < world.size(); ++rank)
      wait_until([&] { return world[rank].counters().exchanges >= exchanges; });
  }

  std::deque<std::vector<float>> data;  // by number, then by rank
  std::vector<std::vector<HandlePtr>> handles;
  LoopbackWorld world;
};
INSTANTIATE_TEST_SUITE_P(Engine, Ahead,
                         testing::Values(Kind{"Exact", ""}, Kind{"Coded", "raw"},
                                         Kind{"Sparse", "topk:8"}),
                         [](const auto& info) { return info.param.name; });

TEST_P(Ahead, LargeOnesBeginWhileTheFirstWaits) {
  submit(0);
  wait_until_begun(1);
  for (int number = 1; number < kTracks; ++number) {
    submit(number);
    wait_until_begun(number + 1);
  }
  for (int number = kTracks; number < 3 * kTracks; ++number) submit(number);
  EXPECT_FALSE(handles[0][0]->done());
  open_gates(world, 1 << 30);
  world.run([&](int rank) {
    for (const HandlePtr& handle : handles[static_cast<size_t>(rank)]) finish(world[rank], handle);
  });
  const auto n = static_cast<size_t>(world.size());
  for (size_t at = 0; at < data.size(); ++at) {
    const float number = static_cast<float>(at / n);
    EXPECT_EQ(data[at].front(), 0 + 1 + 2) << "number " << number;
    EXPECT_EQ(data[at].back(), 3 * number);
    EXPECT_EQ(std::count(data[at].begin(), data[at].end(), 0.0f),
              kLargeCount - (number > 0 ? 2 : 1));
  }
}

TEST_P(Ahead, ADeathEndsThemAll) {
  for (int number = 0; number < 3; ++number) {
    submit(number);
    wait_until_begun(number + 1);
  }
  world.run([&](int rank) {
    if (rank == 1) return world.die(rank);
    for (const HandlePtr& handle : handles[static_cast<size_t>(rank)])
      EXPECT_CONTAINS(error_of<PeerError>([&] { finish(world[rank], handle); }), "is gone");
  });
}

TEST_P(Ahead, NotInMemoryThatTheOneBeforeWritesTo) {
  submit(0);
  wait_until_begun(1);
  const int64_t before = world[1].message_count();
  for (int rank = 0; rank < 3; ++rank) {
    auto request = allreduce_of("again", data[static_cast<size_t>(rank)]);
    request->description.codec = GetParam().codec;
    handles[static_cast<size_t>(rank)].push_back(
        world[rank].submit(std::move(request), Urgency::kNow));
  }
  wait_until([&] { return world[1].message_count() > before; });  // it is reported
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(world[rank].counters().exchanges, 1);
  open_gates(world, 1 << 30);
  world.run([&](int rank) {
    for (const HandlePtr& handle : handles[static_cast<size_t>(rank)]) finish(world[rank], handle);
    EXPECT_EQ(data[static_cast<size_t>(rank)].front(), 3 * (0 + 1 + 2));
  });
}

}  // namespace
}  // namespace bagua
