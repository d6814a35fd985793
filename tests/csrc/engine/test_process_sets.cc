// Process sets as streams of work of their own, and ranks that have run out of work.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/loopback_world.h"

namespace bagua {
namespace {

class JoinOnEveryLayout : public testing::TestWithParam<NodeOf> {};
INSTANTIATE_TEST_SUITE_P(Engine, JoinOnEveryLayout, testing::ValuesIn(layouts()),
                         [](const auto& info) { return name_of(info.param); });

TEST(ProcessSets, ProcessSetsWorkIndependently) {
  LoopbackWorld world(4);
  world.run([&](int rank) {
    const int32_t low = add_set(world[rank], {0, 1}), odd = add_set(world[rank], {1, 3});
    EXPECT_EQ(world[rank].ranks_of(odd), (std::vector<int>{1, 3}));
    for (int step = 0; step < 10; ++step) {
      if (rank <= 1) {
        EXPECT_EQ(sum_of_ones(world[rank], "x", low), 2);
      }
      if (rank % 2) {
        EXPECT_EQ(sum_of_ones(world[rank], "x", odd), 2);
      }
    }
    EXPECT_EQ(sum_of_ones(world[rank], "x"), 4);
    if (rank == 0) {
      EXPECT_CONTAINS(error_of<UsageError>([&] { sum_of_ones(world[rank], "x", odd); }),
                      "rank 0 is not in process set");
    }
    EXPECT_EQ(sum_of_ones(world[rank], ""), 4);
    remove_set(world[rank], odd);
    EXPECT_CONTAINS(error_of<UsageError>([&] { sum_of_ones(world[rank], "x", odd); }),
                    "no process set");
    EXPECT_EQ(add_set(world[rank], {1, 3}), odd + 1);
  });
}

TEST(ProcessSets, ProcessSetsThatCannotBe) {
  LoopbackWorld world(3);
  world.run([&](int rank) {
    const auto refusal = [&](std::vector<int64_t> ranks) {
      return error_of<UsageError>([&] { add_set(world[rank], ranks); });
    };
    EXPECT_CONTAINS(refusal({0, 3}), "rank 3 does not exist");
    EXPECT_CONTAINS(refusal({}), "at least one");
    EXPECT_CONTAINS(refusal({1, 1}), "twice");
    EXPECT_CONTAINS(refusal({0, 1, 2}), "process set 0 already has these ranks");
    EXPECT_CONTAINS(refusal(rank == 2 ? std::vector<int64_t>{0} : std::vector<int64_t>{1}),
                    "ranks");
    EXPECT_CONTAINS(error_of<UsageError>([&] { remove_set(world[rank], 0); }), "world");
    EXPECT_CONTAINS(error_of<UsageError>([&] { remove_set(world[rank], 9); }), "no process set 9");
    EXPECT_EQ(sum_of_ones(world[rank], "x"), 3);
  });
}

// What is in flight in a set when it is removed gets an error, known and new requests alike.
TEST(ProcessSets, RemovingAProcessSetFailsWhatIsOpenInIt) {
  LoopbackWorld world(2);
  world.run([&](int rank) {
    const int32_t set = add_set(world[rank], {0});
    if (rank == 1) return remove_set(world[rank], set);
    EXPECT_EQ(sum_of_ones(world[rank], "x", set), 1);
    EXPECT_EQ(sum_of_ones(world[rank], "", set), 1);
    // Lets rank 1's call arrive, so that the set is gone as soon as this rank removes it too.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    RequestPtr removal = request_of(OpKind::kRemoveProcessSet, "");
    removal->description.root = set;
    const HandlePtr removed = world[rank].submit(removal, Urgency::kWaited);
    std::vector<float> a{1}, b{1};
    // All three travel together, the removal first: nobody drives in between.
    const HandlePtr known =
        world[rank].submit(allreduce_of("x", a, ReduceOp::kSum, set), Urgency::kWaited);
    const HandlePtr unnamed =
        world[rank].submit(allreduce_of("", b, ReduceOp::kSum, set), Urgency::kWaited);
    finish(world[rank], removed);
    // Whichever came first, each is done: with a result or with the reason.
    for (const HandlePtr& handle : {known, unnamed})
      EXPECT_TRUE(world[rank].wait(*handle, 10)) << "never done";
  });
}

// A thread that does not know of the removal gets a result, or hears why not, and nothing stays
// open.
TEST(ProcessSets, RemovingProcessSetsThatAreInUse) {
  LoopbackWorld world(3);
  world.run([&](int rank) {
    for (int round = 0; round < 30; ++round) {
      const int32_t set = add_set(world[rank], {0, 2});
      std::atomic<bool> over{false};
      std::thread user([&] {
        for (int i = 0; !over && rank != 1; ++i) try {
            sum_of_ones(world[rank], i % 2 ? "x" : "", set);
          } catch (const UsageError& error) {
            EXPECT_CONTAINS(error.what(), "process set " + std::to_string(set));
          } catch (const PeerError& error) {
            EXPECT_CONTAINS(error.what(), "was removed");
          }
      });
      EXPECT_EQ(sum_of_ones(world[rank], "y"), 3);
      remove_set(world[rank], set);
      over = true;
      user.join();
      EXPECT_EQ(sum_of_ones(world[rank], "y"), 3);
    }
  });
}

TEST(ProcessSets, RemovingAProcessSetEndsAJoin) {
  LoopbackWorld world(4);
  world.run([&](int rank) {
    const int32_t set = add_set(world[rank], {0, 1, 2});
    HandlePtr joined;
    if (rank % 2 == 0)
      joined = world[rank].submit(request_of(OpKind::kJoin, "", set), Urgency::kNow);
    if (rank == 1) {
      EXPECT_EQ(sum_of_ones(world[rank], "x", set), 1);
    }
    EXPECT_EQ(sum_of_ones(world[rank], "y"), 4);
    remove_set(world[rank], set);
    if (joined) {
      EXPECT_CONTAINS(error_of<PeerError>([&] { finish(world[rank], joined); }), "was removed");
    }
    EXPECT_EQ(sum_of_ones(world[rank], "y"), 4);
    EXPECT_GE(join(world[rank]), 0);
  });
}

TEST_P(JoinOnEveryLayout, ContributesZeros) {
  LoopbackWorld world(GetParam());
  const int n = world.size();
  world.run([&](int rank) {
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int step = 0; step <= rank; ++step) {
        EXPECT_EQ(sum_of_ones(world[rank], "x"), static_cast<float>(n - step));
        EXPECT_EQ(sum_of_ones(world[rank], ""), static_cast<float>(n - step));
        std::vector<int32_t> mine{rank, step};
        RequestPtr gather = request_of(OpKind::kAllgather, "g");
        add_vector(*gather, mine);
        const HandlePtr handle = gather->handle;
        call(world[rank], gather);
        std::vector<int64_t> rows(static_cast<size_t>(n), 2);
        std::fill(rows.begin(), rows.begin() + step, 0);
        EXPECT_EQ(handle->outputs.at(0).rows, rows);
      }
      EXPECT_EQ(join(world[rank]), n - 1);
    }
    EXPECT_EQ(sum_of_ones(world[rank], ""), static_cast<float>(n));
  });
}

TEST(Join, RefusesWhatNeedsEveryone) {
  LoopbackWorld world(2);
  world.run([&](int rank) {
    if (rank == 1) {
      std::vector<float> data{1, 2};
      RequestPtr swap = request_of(OpKind::kAlltoall, "a");
      add_vector(*swap, data);
      swap->splits = {1, 1};
      EXPECT_CONTAINS(error_of<UsageError>([&] { call(world[rank], swap); }), "rank 0 has joined");
      RequestPtr spread = request_of(OpKind::kBroadcast, "b");
      spread->description.root = 0;
      add_vector(*spread, data);
      EXPECT_CONTAINS(error_of<UsageError>([&] { call(world[rank], spread); }), "root, rank 0");
    }
    EXPECT_EQ(join(world[rank]), 1);
  });
}

// A rank that has joined must take the same order as the others.
TEST(Join, KeepsTheOrderOfPriorities) {
  LoopbackWorld world(2);
  world.run([&](int rank) {
    std::vector<float> a(10, 1);
    std::vector<int32_t> b(3, 1);
    const auto step = [&] {
      RequestPtr first = allreduce_of("a", a);
      RequestPtr second = allreduce_of("b", b, ReduceOp::kMax);
      first->description.priority = -1;
      std::vector<HandlePtr> handles{world[rank].submit(first, Urgency::kWaited),
                                     world[rank].submit(second, Urgency::kWaited)};
      for (const HandlePtr& handle : handles) finish(world[rank], handle);
    };
    step();
    EXPECT_EQ(a, std::vector<float>(10, 2));
    if (rank == 1) {
      for (int i = 0; i < 5; ++i) step();
      EXPECT_EQ(a, std::vector<float>(10, 2));
      EXPECT_EQ(b, std::vector<int32_t>(3, 1));
    }
    EXPECT_EQ(join(world[rank]), 1);
  });
}

}  // namespace
}  // namespace bagua
