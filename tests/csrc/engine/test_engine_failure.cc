// The engine when ranks leave, die, fall silent or do not come.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <string>

#include "engine/loopback_world.h"

namespace bagua {
namespace {

class EveryDriver : public testing::TestWithParam<bool> {
 protected:
  Config config() const {
    Config config = quiet_config();
    config.inline_drive = GetParam();
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(EngineFailure, EveryDriver, testing::Bool(),
                         [](const auto& info) { return info.param ? "Inline" : "Thread"; });

// The same where so many ranks share a node.
struct Nodes {
  bool inline_drive;
  int ranks_per_node;
};
class EveryDriverOnNodes : public testing::TestWithParam<Nodes> {
 protected:
  NodeOf three() const { return nodes_of(3, GetParam().ranks_per_node); }
  Config config() const {
    Config config = quiet_config(three());
    config.inline_drive = GetParam().inline_drive;
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(EngineFailure, EveryDriverOnNodes,
                         testing::Values(Nodes{true, 1}, Nodes{false, 1}, Nodes{true, 2},
                                         Nodes{false, 2}, Nodes{true, 3}, Nodes{false, 3}),
                         [](const auto& info) {
                           return std::to_string(info.param.ranks_per_node) +
                                  (info.param.inline_drive ? "_Inline" : "_Thread");
                         });

// ---- shutting down -----------------------------------------------------------------------------

TEST_P(EveryDriver, RequestsAfterStopAreRefused) {
  LoopbackWorld world(2, config());
  world.stop();
  const std::string text = error_of<UsageError>([&] { sum_of_ones(world[0], "x"); });
  EXPECT_CONTAINS(text, "shut down");
}

TEST_P(EveryDriver, WithoutMemoryToTellOfItAFailureIsOneAllTheSame) {
  LoopbackWorld world(2, config());
  world.run([&](int rank) { EXPECT_EQ(sum_of_ones(world[rank], "x"), 2); });
  world.run([&](int rank) {
    if (rank == 0) {
      EXPECT_CONTAINS(error_of<PeerError>([&] { sum_of_ones(world[0], "x"); }), "rank 1");
      return;
    }
    world.board.starve(1);
    EXPECT_CONTAINS(error_of<InternalError>([&] { sum_of_ones(world[1], "x"); }), "bad_alloc");
    world.die(1);
  });
}

TEST_P(EveryDriver, WithoutMemoryToSayGoodbyeItEnds) {
  LoopbackWorld world(2, config());
  world.run([&](int rank) { EXPECT_EQ(sum_of_ones(world[rank], "x"), 2); });
  world.board.starve(1);
  world[1].stop();
  EXPECT_TRUE(world[1].wait_stopped(kHangS));
  world.die(1);
}

TEST_P(EveryDriverOnNodes, OneThatShutsDownEarlyFailsThoseThatNeedIt) {
  for (int early = 0; early < 3; ++early) {
    LoopbackWorld world(three(), config());
    world.run([&](int rank) {
      EXPECT_EQ(sum_of_ones(world[rank], "x"), 3);
      if (rank == early) return world[rank].stop();
      for (const char* name : {"x", "new", ""}) {
        const std::string text = error_of<PeerError>([&] { sum_of_ones(world[rank], name); });
        EXPECT_CONTAINS(text, "rank " + std::to_string(early));
        EXPECT_CONTAINS(text, "shut down");
      }
    });
  }
}

TEST_P(EveryDriverOnNodes, OneThatShutsDownEarlyLeavesOtherSetsAlone) {
  LoopbackWorld world(three(), config());
  world.run([&](int rank) {
    const int32_t set = add_set(world[rank], {1, 2});
    if (rank == 0) return world[rank].stop();
    for (int step = 0; step < 20; ++step) EXPECT_EQ(sum_of_ones(world[rank], "x", set), 2);
  });
}

// What is in flight here fails here, and on the others, who would wait for ever.
TEST_P(EveryDriver, StopFailsWhatIsInFlight) {
  LoopbackWorld world(2, config());
  std::atomic<bool> stopped{false};
  world.run([&](int rank) {
    std::vector<float> data{1};
    if (rank == 0) {
      const HandlePtr handle = world[rank].submit(allreduce_of("x", data), Urgency::kNow);
      world[rank].stop();
      EXPECT_CONTAINS(error_of<UsageError>([&] { finish(world[rank], handle); }), "in flight");
      stopped = true;
    } else {
      while (!stopped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_CONTAINS(error_of<PeerError>([&] { call(world[rank], allreduce_of("x", data)); }),
                      "shut down");
    }
  });
}

// One thread of a rank shuts down while another waits, without a deadline, for what never comes.
TEST_P(EveryDriver, StopEndsWaitsOfOtherThreads) {
  LoopbackWorld world(2, config());
  run_ranks(2, [&](int thread) {
    if (thread == 0) {
      EXPECT_CONTAINS(error_of<UsageError>([&] { sum_of_ones(world[0], "x"); }), "shut down");
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      world[0].stop();
    }
  });
}

// All ranks have submitted, so the exchange may have been agreed when they shut down: each handle
// has the sum or an error, and every rank comes to its end.
TEST_P(EveryDriverOnNodes, StopRightAfterSubmitting) {
  for (int round = 0; round < 50; ++round) {
    LoopbackWorld world(three(), config());
    world.run([&](int rank) {
      std::vector<float> data(5000, 1);
      const HandlePtr handle = world[rank].submit(allreduce_of("x", data), Urgency::kNow);
      for (int spin = 0; spin < round * rank * 100; ++spin) std::this_thread::yield();
      world[rank].stop();
      ASSERT_TRUE(world[rank].wait_stopped(30)) << "rank " << rank << ", round " << round;
      ASSERT_TRUE(handle->done());
      if (!handle->failure()) {
        EXPECT_EQ(data, std::vector<float>(5000, 3));
      }
    });
    if (HasFatalFailure()) std::abort();  // the world cannot be taken down any more
  }
}

TEST_P(EveryDriverOnNodes, JoinEndsWhenTheOthersShutDown) {
  LoopbackWorld world(three(), config());
  world.run([&](int rank) {
    if (rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return world[rank].stop();
    }
    RequestPtr request = request_of(OpKind::kJoin, "");
    const HandlePtr handle = world[rank].submit(request, Urgency::kWaited);
    EXPECT_TRUE(world[rank].wait(*handle, 10)) << "rank " << rank << " waits for ever";
  });
}

// ---- death and silence -------------------------------------------------------------------------

TEST_P(EveryDriverOnNodes, DeathIsAnErrorThatNamesTheRank) {
  for (int dead = 0; dead < 3; ++dead) {
    LoopbackWorld world(three(), config());
    std::atomic<int> through{0};
    world.run([&](int rank) {
      EXPECT_EQ(sum_of_ones(world[rank], "x"), 3);
      ++through;
      while (through < 3) std::this_thread::yield();
      if (rank == dead) return world.die(rank);
      const std::string who =
          "rank " + std::to_string(dead) + " (host h" + std::to_string(dead) + ")";
      const std::string text = error_of<PeerError>([&] { sum_of_ones(world[rank], "x"); });
      EXPECT_CONTAINS(text, who);
      EXPECT_CONTAINS(text, "is gone");
      // Everything later gets the same.
      EXPECT_EQ(error_of<PeerError>([&] { sum_of_ones(world[rank], "y"); }), text);
      ASSERT_TRUE(world[rank].failure());
      EXPECT_EQ(world[rank].failure()->what, text);
    });
  }
}

TEST_P(EveryDriverOnNodes, DeathFailsEveryOpenHandle) {
  LoopbackWorld world(three(), config());
  world.run([&](int rank) {
    if (rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return world.die(rank);
    }
    std::vector<std::vector<float>> data(50, std::vector<float>(10, 1));
    std::vector<HandlePtr> handles;
    for (auto& values : data) {
      const std::string name = handles.size() % 2 ? "" : "t" + std::to_string(handles.size());
      handles.push_back(world[rank].submit(allreduce_of(name, values), Urgency::kSoon));
    }
    for (const HandlePtr& handle : handles)
      EXPECT_CONTAINS(error_of<PeerError>([&] { finish(world[rank], handle); }), "rank 2");
  });
}

TEST_P(EveryDriver, SilenceIsAnErrorThatNamesTheRank) {
  Config impatient = config();
  impatient.peer_timeout_s = 0.5;
  for (const int silent : {0, 2}) {
    LoopbackWorld world(3, impatient);
    std::atomic<int> failed{0};
    world.run([&](int rank) {
      EXPECT_EQ(sum_of_ones(world[rank], "x"), 3);
      if (rank == silent) {
        world.board.freeze(rank, true);
        while (failed < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        world.board.freeze(rank, false);
        return;
      }
      const std::string text = error_of<PeerError>([&] { sum_of_ones(world[rank], "x"); });
      ++failed;
      EXPECT_CONTAINS(text, "rank " + std::to_string(silent) + " (host h");
      EXPECT_CONTAINS(text, "has not answered");
      EXPECT_CONTAINS(text, "peer_timeout_s");
    });
  }
}

// A rank that computes for long answers pings all the while: that is no silence.
TEST_P(EveryDriver, SlownessIsNoError) {
  Config impatient = config();
  impatient.peer_timeout_s = 0.5;
  LoopbackWorld world(3, impatient);
  world.run([&](int rank) {
    EXPECT_EQ(sum_of_ones(world[rank], "x"), 3);
    if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(5));
    EXPECT_EQ(sum_of_ones(world[rank], "x"), 3);
  });
}

// ---- stalls ------------------------------------------------------------------------------------

TEST_P(EveryDriver, StallFailsTheRequestButNotTheEngine) {
  Config strict = config();
  strict.stall_fail_s = 0.5;
  LoopbackWorld world(3, strict);
  std::atomic<int> failed{0};
  world.run([&](int rank) {
    EXPECT_EQ(sum_of_ones(world[rank], "known"), 3);
    for (const char* name : {"known", "new", ""}) {
      if (rank == 1) continue;
      const std::string text = error_of<PeerError>([&] { sum_of_ones(world[rank], name); });
      EXPECT_CONTAINS(text, "rank 1 not ready after");
      EXPECT_CONTAINS(text, "stall_fail_s");
      if (*name) {
        EXPECT_CONTAINS(text, name);
      }
    }
    ++failed;
    while (failed < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(sum_of_ones(world[rank], "other"), 3);
    EXPECT_EQ(sum_of_ones(world[rank], "known"), 3);
  });
}

// A rank that comes at last brings what the others have given up, and must not meet what they ask
// for next by the same name.
TEST_P(EveryDriver, WhoComesTooLateHearsSo) {
  Config strict = config();
  strict.stall_fail_s = 0.5;
  LoopbackWorld world(3, strict);
  std::map<std::string, std::atomic<int>> failed;
  for (const char* name : {"known", "new", ""}) failed[name] = 0;
  world.run([&](int rank) {
    EXPECT_EQ(sum_of_ones(world[rank], "known"), 3);
    for (auto& [name, count] : failed) {
      while (rank == 1 && count < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_CONTAINS(error_of<PeerError>([&, &of = name] { sum_of_ones(world[rank], of); }),
                      rank == 1 ? "gave up waiting for this rank" : "rank 1 not ready after");
      ++count;
      while (count < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_EQ(sum_of_ones(world[rank], name), 3);
    }
  });
}

TEST_P(EveryDriver, StallFailsAJoin) {
  Config strict = config();
  strict.stall_fail_s = 0.5;
  LoopbackWorld world(3, strict);
  std::atomic<int> failed{0};
  world.run([&](int rank) {
    if (rank != 1) {
      EXPECT_CONTAINS(error_of<PeerError>([&] { join(world[rank]); }),
                      "join: rank 1 not ready after");
    }
    ++failed;
    while (failed < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(sum_of_ones(world[rank], "x"), 3);
  });
}

// Rank 0 stays until all have shut down, which one may never do.
TEST_P(EveryDriver, StallFailsTheEndOfRankZero) {
  Config strict = config();
  strict.stall_fail_s = 0.5;
  LoopbackWorld world(3, strict);
  std::atomic<bool> over{false};
  world.run([&](int rank) {
    EXPECT_EQ(sum_of_ones(world[rank], "x"), 3);
    if (rank != 1) {
      world[rank].stop();
      EXPECT_TRUE(world[rank].wait_stopped(kHangS));
    }
    if (rank == 0) {
      ASSERT_TRUE(world[rank].failure());
      EXPECT_CONTAINS(world[rank].failure()->what, "has waited for rank 1 to do so");
      over = true;
    }
    if (rank != 1) return;
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_CONTAINS(error_of<PeerError>([&] { sum_of_ones(world[rank], "x"); }),
                    "has waited for rank 1 to do so");
  });
}

// The others may have work of their own for as long as they like.
TEST_P(EveryDriver, WorkOfOthersIsNoStallAtTheEnd) {
  Config strict = config();
  strict.stall_fail_s = 1;
  LoopbackWorld world(3, strict);
  world.run([&](int rank) {
    const int32_t set = add_set(world[rank], {1, 2});
    if (rank > 0)
      for (int i = 0; i < 30; ++i) {  // as many on both, for three seconds
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        EXPECT_EQ(sum_of_ones(world[rank], "x", set), 2);
      }
    world[rank].stop();
    EXPECT_TRUE(world[rank].wait_stopped(kHangS));
    EXPECT_FALSE(world[rank].failure());
  });
}

// What the others asked for meanwhile, without a name, with success or without, was counted.
TEST_P(EveryDriver, UnnamedRequestsMeetAfterAJoinThatFailed) {
  Config strict = config();
  strict.stall_fail_s = 0.5;
  LoopbackWorld world(3, strict);
  std::atomic<int> failed{0};
  world.run([&](int rank) {
    if (rank == 1) {
      EXPECT_EQ(sum_of_ones(world[rank], ""), 1);
      std::vector<float> data{1, 2, 3};
      RequestPtr swap = request_of(OpKind::kAlltoall, "");
      add_vector(*swap, data);
      swap->splits = {1, 1, 1};
      EXPECT_CONTAINS(error_of<UsageError>([&] { call(world[rank], swap); }), "joined");
    } else {
      EXPECT_CONTAINS(error_of<PeerError>([&] { join(world[rank]); }), "rank 1 not ready");
    }
    ++failed;
    while (failed < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(sum_of_ones(world[rank], ""), 3);
  });
}

}  // namespace
}  // namespace bagua
