#include "engine/bucket.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "device/pretend.h"
#include "engine/loopback_world.h"

namespace bagua {
namespace {

Description sum() { return {}; }

TEST(Bucket, SlotsLieOnCacheLinesInOneArena) {
  LoopbackWorld world(1);
  Bucket bucket(world.engines[0], "b", DType::kF32, {1, 0, 16, 17}, sum(), 0, 0);
  EXPECT_EQ(bucket.begins(), (std::vector<int64_t>{0, 16, 16, 32}));
  EXPECT_EQ(bucket.nbytes(), 64 * 4);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(bucket.data()) % 64, 0u);
  for (int64_t i = 0; i < bucket.nbytes(); ++i) EXPECT_EQ(bucket.data()[i], 0);
}

TEST(Bucket, LastSlotTellsThatItIsTheLast) {
  LoopbackWorld world(1);
  Bucket bucket(world.engines[0], "b", DType::kF32, {1, 1, 1}, sum(), 0, 0);
  for (int round = 0; round < 2; ++round) {
    EXPECT_FALSE(bucket.ready(1));
    EXPECT_FALSE(bucket.ready(1)) << "said twice";
    EXPECT_FALSE(bucket.ready(0));
    EXPECT_EQ(bucket.missing(), (std::vector<int>{2}));
    EXPECT_TRUE(bucket.ready(2));
    EXPECT_FALSE(bucket.ready(2));
    EXPECT_TRUE(bucket.missing().empty());
    finish(world[0], bucket.launch(Urgency::kNow));
    EXPECT_EQ(bucket.missing(), (std::vector<int>{0, 1, 2}));
  }
}

TEST(Bucket, QuietCountingLeavesTheLastSlotToReady) {
  LoopbackWorld world(1);
  Bucket bucket(world.engines[0], "b", DType::kF32, {1, 1}, sum(), 0, 0);
  for (int round = 0; round < 2; ++round) {
    EXPECT_FALSE(bucket.quiet());
    bucket.count_quietly(true);
    EXPECT_TRUE(bucket.quiet());
    EXPECT_TRUE(bucket.ready_but_not_last(1));
    EXPECT_TRUE(bucket.ready_but_not_last(1)) << "said twice";
    EXPECT_FALSE(bucket.ready_but_not_last(0));
    EXPECT_EQ(bucket.missing(), (std::vector<int>{0}));
    EXPECT_TRUE(bucket.ready(0));
    finish(world[0], bucket.launch(Urgency::kNow));
  }
}

TEST(Bucket, ExactlyOneThreadIsTheLast) {
  LoopbackWorld world(1);
  Bucket bucket(world.engines[0], "b", DType::kF32, std::vector<int64_t>(64, 1), sum(), 0, 0);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> last{0};
    run_ranks(4, [&](int thread) {
      for (int slot = thread; slot < 64; slot += 4) last += bucket.ready(slot);
    });
    EXPECT_EQ(last, 1);
    finish(world[0], bucket.launch(Urgency::kNow));
  }
}

TEST(Bucket, SumsItsArenaInPlace) {
  LoopbackWorld world(3);
  world.run([&](int rank) {
    Bucket bucket(world.engines[static_cast<size_t>(rank)], "b", DType::kF32, {3, 20, 5000}, sum(),
                  0, 0);
    for (int step = 0; step < 5; ++step) {
      auto* values = reinterpret_cast<float*>(bucket.data());
      for (const int64_t begin : bucket.begins()) values[begin] = static_cast<float>(rank + step);
      for (int slot = 0; slot < 3; ++slot) EXPECT_EQ(bucket.ready(slot), slot == 2);
      finish(world[rank], bucket.launch(Urgency::kNow));
      for (const int64_t begin : bucket.begins())
        EXPECT_EQ(values[begin], static_cast<float>(3 + 3 * step));
    }
  });
}

// Of some ranks only, and of other ranks each time.
TEST(Bucket, SumsLargeSlotsWhereTheyAre) {
  for (const int n : {1, 2, 3}) {
    LoopbackWorld world(n);
    const std::vector<int64_t> counts = {3, 0, 20, 5000, 200000, 7, 300001};
    world.run([&](int rank) {
      Bucket bucket(world.engines[static_cast<size_t>(rank)], "b", DType::kF32, counts, sum(), 0,
                    0);
      ASSERT_EQ(bucket.large(), std::vector<bool>({false, false, false, false, true, false, true}));
      EXPECT_THROW(bucket.launch(Urgency::kNow, {{3, bucket.data()}}), InternalError);
      std::vector<float> here[7];
      for (int step = 0; step < 6; ++step) {
        std::vector<Bucket::Place> places;
        for (const int slot : {0, 2, 3, 4, 5, 6}) {
          auto* data =
              reinterpret_cast<float*>(bucket.data()) + bucket.begins()[static_cast<size_t>(slot)];
          here[slot].assign(counts[static_cast<size_t>(slot)], static_cast<float>(rank + step));
          const bool large = slot == 4 || slot == 6;
          if (large && (slot / 2 + step + rank) % 3) {
            places.push_back({slot, reinterpret_cast<char*>(here[slot].data())});
          } else {
            std::copy(here[slot].begin(), here[slot].end(), data);
          }
        }
        finish(world[rank], bucket.launch(Urgency::kNow, places));
        const auto right = static_cast<float>(n * (n - 1) / 2 + n * step);
        auto place = places.begin();
        for (const int slot : {0, 2, 3, 4, 5, 6}) {
          const bool elsewhere = place != places.end() && place->slot == slot;
          const auto* own =
              reinterpret_cast<float*>(bucket.data()) + bucket.begins()[static_cast<size_t>(slot)];
          const auto* data = elsewhere ? here[slot].data() : own;
          if (elsewhere) ++place;
          for (const int64_t i : {0, 1, 2}) EXPECT_EQ(data[i], right) << "slot " << slot;
        }
      }
    });
  }
}

TEST(Bucket, OneThatCannotBeMadeHasNoArena) {
  LoopbackWorld world(1);
  PretendDevice device(/*work_us=*/0);
  std::vector<char> memory(64);
  int allocated = 0;
  const auto allocate = [&](size_t) -> std::shared_ptr<char> {
    if (allocated++ > 0) throw std::bad_alloc();
    return {memory.data(), [](char*) {}};
  };
  EXPECT_THROW(
      Bucket(world.engines[0], "b", DType::kF32, {16}, sum(), 0, 0, /*kept=*/1, &device, allocate),
      std::bad_alloc);
  EXPECT_EQ(allocated, 2);
  EXPECT_FALSE(Bucket::in_an_arena(memory.data()));
}

TEST(Bucket, MayBeForgottenWhileItIsInFlight) {
  LoopbackWorld world(2);
  world.run([&](int rank) {
    HandlePtr handle;
    {
      Bucket bucket(world.engines[static_cast<size_t>(rank)], "b", DType::kF64, {100000}, sum(), 0,
                    0);
      handle = bucket.launch(Urgency::kNow);
    }
    finish(world[rank], handle);
  });
}

}  // namespace
}  // namespace bagua
