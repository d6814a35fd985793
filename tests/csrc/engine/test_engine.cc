// The engine when all goes well, and when callers make mistakes that they can mend.
#include "common/scaled.h"
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <numeric>

#include "collective/peers.h"
#include "engine/loopback_world.h"

namespace bagua {
namespace {

class EveryLayout : public testing::TestWithParam<NodeOf> {
 protected:
  int n() const { return static_cast<int>(GetParam().size()); }
};
INSTANTIATE_TEST_SUITE_P(Engine, EveryLayout, testing::ValuesIn(layouts()),
                         [](const auto& info) { return name_of(info.param); });

class EverySize : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Engine, EverySize, testing::Values(1, 2, 3, 5));

TEST_P(EveryLayout, SumsNamedAndUnnamed) {
  LoopbackWorld world(GetParam());
  const float sum = static_cast<float>(n());
  world.run([&](int rank) {
    for (int step = 0; step < 5; ++step) {
      EXPECT_EQ(sum_of_ones(world[rank], "x"), sum);
      EXPECT_EQ(sum_of_ones(world[rank], ""), sum);
      EXPECT_EQ(sum_of_ones(world[rank], ""), sum);
    }
  });
}

TEST_P(EveryLayout, AgreesWhateverTheOrder) {
  LoopbackWorld world(GetParam());
  constexpr int kNames = 20;
  world.run([&](int rank) {
    for (int step = 0; step < 3; ++step) {
      std::vector<std::vector<int32_t>> data;
      for (int i = 0; i < kNames; ++i) data.emplace_back(static_cast<size_t>(i), rank + i);
      std::vector<HandlePtr> handles;
      for (int k = 0; k < kNames; ++k) {
        const int i = (k * 7 + rank * 3 + step) % kNames;
        handles.push_back(world[rank].submit(
            allreduce_of("t" + std::to_string(i), data[static_cast<size_t>(i)]), Urgency::kSoon));
      }
      for (const HandlePtr& handle : handles) finish(world[rank], handle);
      for (int i = 0; i < kNames; ++i)
        for (const int32_t x : data[static_cast<size_t>(i)])
          ASSERT_EQ(x, n() * (n() - 1) / 2 + n() * i);
    }
  });
}

// A request whose urgency asks for no waiting thread must be done without one.
TEST_P(EveryLayout, CompletesThoughNobodyWaits) {
  for (const bool inline_drive : {true, false}) {
    Config config = quiet_config(GetParam());
    config.inline_drive = inline_drive;
    LoopbackWorld world(GetParam(), config);
    world.run([&](int rank) {
      for (int step = 0; step < 300; ++step) {
        std::vector<float> one{1};
        const Urgency urgency = step % 2 ? Urgency::kNow : Urgency::kSoon;
        const HandlePtr handle = world[rank].submit(allreduce_of("x", one), urgency);
        while (!handle->done()) std::this_thread::sleep_for(std::chrono::microseconds(20));
        handle->rethrow();
        ASSERT_EQ(one[0], static_cast<float>(n()));
      }
    });
  }
}

TEST_P(EveryLayout, CompletesForSeveralThreadsThatWait) {
  for (const bool inline_drive : {true, false}) {
    Config config = quiet_config(GetParam());
    config.inline_drive = inline_drive;
    LoopbackWorld world(GetParam(), config);
    constexpr int kThreads = 4;
    run_ranks(n() * kThreads, [&](int index) {
      const int rank = index / kThreads;
      const std::string name = "thread " + std::to_string(index % kThreads);
      for (int step = 0; step < 50; ++step)
        ASSERT_EQ(sum_of_ones(world[rank], name), static_cast<float>(n()));
    });
  }
}

// Large reductions, in arenas and elsewhere: helpers join while somebody waits, and only then.
TEST_P(EverySize, HelpersReduceAlong) {
  Config config = quiet_config();
  config.helpers = 2;
  const int n = GetParam();
  LoopbackWorld world(n, config, std::vector<int>(static_cast<size_t>(n), 0));
  const int64_t count = scaled(5 << 20) / 4 * n + 3;
  world.run([&](int rank) {
    Engine& engine = world[rank];
    const auto arena = engine.allocate(static_cast<size_t>(count) * sizeof(float));
    std::vector<float> elsewhere(static_cast<size_t>(count));
    const auto reduce = [&](float* data, Urgency urgency) {
      for (int64_t i = 0; i < count; ++i) data[i] = static_cast<float>(rank + i % 7);
      RequestPtr request = request_of(OpKind::kAllreduce, "large");
      request->description.add_tensor(DType::kF32, {count});
      auto* const bytes = reinterpret_cast<char*>(data);
      request->parts.push_back({bytes, bytes});
      const HandlePtr handle = engine.submit(std::move(request), urgency);
      while (urgency == Urgency::kNow && !handle->done())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      finish(engine, handle);
      for (int64_t i = 0; i < count; ++i)
        ASSERT_EQ(data[i], static_cast<float>(n * (n - 1) / 2 + i % 7 * n));
    };
    std::vector<float*> places = {reinterpret_cast<float*>(arena.get())};
    if (n <= 1 + config.helpers) places.push_back(elsewhere.data());  // else there is too little
    for (float* data : places) {
      const int64_t before = engine.counters().helped;
      for (int again = 0; again < 3; ++again) reduce(data, Urgency::kNow);
      EXPECT_EQ(engine.counters().helped, before);
      // A helper that wakes up late finds nothing to do.
      std::vector<float> helped{0};
      while (n > 1 && helped[0] < static_cast<float>(n)) {
        reduce(data, Urgency::kWaited);
        helped[0] = engine.counters().helped > before;
        call(engine, allreduce_of("helped", helped));
      }
    }
  });
}

TEST(Engine, IdleExchangesNothing) {
  LoopbackWorld world(3);
  world.run([&](int rank) { sum_of_ones(world[rank], "x"); });
  std::vector<int64_t> before;
  for (int rank = 0; rank < 3; ++rank) before.push_back(world[rank].message_count());
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // longer than any tick
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(world[rank].message_count(), before[static_cast<size_t>(rank)]);
}

TEST(Engine, CountsWhatItSends) {
  LoopbackWorld world(2);
  world.run([&](int rank) {
    std::vector<float> data(1000, 1);
    call(world[rank], allreduce_of("x", data));
    EXPECT_EQ(world[rank].counters().sent_nbytes, 4000);
    EXPECT_EQ(world[rank].counters().exchanges, 1);
  });
}

TEST(Engine, FusesSmallRequestsAndKeepsLargeOnesApart) {
  LoopbackWorld world(2);
  world.run([&](int rank) {
    std::vector<std::vector<float>> data(10, std::vector<float>(5, 1));
    std::vector<HandlePtr> handles;
    for (auto& values : data)
      handles.push_back(world[rank].submit(
          allreduce_of("t" + std::to_string(handles.size()), values), Urgency::kWaited));
    for (const HandlePtr& handle : handles) finish(world[rank], handle);
    for (const auto& values : data) EXPECT_EQ(values, std::vector<float>(5, 2));
    EXPECT_LE(world[rank].counters().exchanges, 3);
  });
}

struct Driven {
  bool inline_drive;
  NodeOf node_of;
};
class InlineOrNot : public testing::TestWithParam<Driven> {};
INSTANTIATE_TEST_SUITE_P(Engine, InlineOrNot,
                         testing::Values(Driven{true, {0, 1}}, Driven{false, {0, 1}},
                                         Driven{true, {0, 0, 1}}, Driven{false, {0, 0, 1}}),
                         [](const auto& info) {
                           return name_of(info.param.node_of) +
                                  (info.param.inline_drive ? "_Inline" : "_Thread");
                         });

// Rank 1 waits for a message, or for a word of rank 0, which does.
TEST_P(InlineOrNot, AgreesOnTheNextExchangeDuringOne) {
  const NodeOf& node_of = GetParam().node_of;
  Config config = quiet_config(node_of);
  config.inline_drive = GetParam().inline_drive;
  LoopbackWorld world(node_of, config);
  constexpr int kMany = 50;
  const int n = world.size();
  std::vector<std::vector<float>> data(static_cast<size_t>(n * (kMany + 2)), {1});
  std::vector<std::vector<HandlePtr>> handles(static_cast<size_t>(n));
  const auto submit = [&](const std::string& name) {
    for (int rank = 0; rank < n; ++rank) {
      auto& mine = handles[static_cast<size_t>(rank)];
      auto& values = data[static_cast<size_t>(rank * (kMany + 2)) + mine.size()];
      mine.push_back(world[rank].submit(allreduce_of(name, values), Urgency::kNow));
    }
  };
  open_gates(world, 0);
  submit("first");
  for (const int rank : {0, n - 1})
    wait_until([&] { return world.gates[static_cast<size_t>(rank)].shut_out.load(); });
  const int64_t before = world[1].message_count();
  submit("next");
  wait_until([&] { return world[1].message_count() > before; });  // and the first goes on
  for (int i = 0; i < kMany; ++i) submit("late " + std::to_string(i));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(world[1].message_count(), before + 1);
  for (const auto& mine : handles) EXPECT_FALSE(mine[0]->done());
  open_gates(world, 1 << 30);
  world.run([&](int rank) {
    for (const HandlePtr& handle : handles[static_cast<size_t>(rank)]) finish(world[rank], handle);
  });
  for (const auto& values : data) EXPECT_EQ(values[0], static_cast<float>(n));
  EXPECT_LE(world[0].counters().exchanges, 6);  // the late ones share theirs
}

TEST(Engine, WhoHasWhatItWaitsForDrivesNoFurther) {
  LoopbackWorld world(2);
  std::vector<float> mine[2] = {{1}, {1}}, others[2] = {{1}, {1}};
  HandlePtr later[2];
  open_gates(world, 0);
  world.run([&](int rank) {
    std::thread other([&] {
      wait_until([&] { return world.gates[static_cast<size_t>(rank)].shut_out.load(); });
      const int64_t before = world[1].message_count();
      later[rank] = world[rank].submit(allreduce_of("other", others[rank]), Urgency::kNow);
      if (rank == 0) return;
      wait_until([&] { return world[1].message_count() > before; });
      wait_until([&] { return world.gates[0].shut_out.load(); });  // else it never would
      open_gates(world, 1);                                        // for what is under way
    });
    call(world[rank], allreduce_of("mine", mine[rank]));
    other.join();
    EXPECT_FALSE(later[rank]->done());
  });
  open_gates(world, 1 << 30);
  world.run([&](int rank) { finish(world[rank], later[rank]); });
  for (const int rank : {0, 1}) EXPECT_EQ(mine[rank][0] + others[rank][0], 4);
}

TEST(Engine, GroupGoesAsOne) {
  LoopbackWorld world(3);
  world.run([&](int rank) {
    std::vector<float> a(3, 1), none, b(2049, 2);
    std::vector<int32_t> c(7, rank);
    RequestPtr request = request_of(OpKind::kAllreduce, "group");
    add_vector(*request, a);
    add_vector(*request, none);
    add_vector(*request, c);
    add_vector(*request, b);
    call(world[rank], request);
    EXPECT_EQ(a, std::vector<float>(3, 3));
    EXPECT_EQ(b, std::vector<float>(2049, 6));
    EXPECT_EQ(c, std::vector<int32_t>(7, 3));
  });
}

// ---- callers' mistakes -------------------------------------------------------------------------

TEST(Engine, MismatchIsAnErrorOnEveryRankAndTheEngineGoesOn) {
  LoopbackWorld world(3);
  world.run([&](int rank) {
    for (int round = 0; round < 2; ++round) {
      std::vector<float> data(rank == 1 ? 5 : 4, 1);
      const std::string text =
          error_of<UsageError>([&] { call(world[rank], allreduce_of("w", data)); });
      EXPECT_CONTAINS(text, "w: ");
      EXPECT_CONTAINS(text, "shape");
      EXPECT_CONTAINS(text, "[4]");
      EXPECT_CONTAINS(text, "[5] on rank 1");
      std::vector<float> good(4, 1);
      call(world[rank], allreduce_of("w", good));
      EXPECT_EQ(good, std::vector<float>(4, 3));
    }
  });
}

TEST(Engine, NamesTheFirstDifference) {
  LoopbackWorld world(2);
  world.run([&](int rank) {
    const auto differ = [&](RequestPtr here, RequestPtr there) {
      return error_of<UsageError>(
          [&] { call(world[rank], rank == 0 ? std::move(here) : std::move(there)); });
    };
    std::vector<float> f(6, 1);
    std::vector<int32_t> i(6, 1);
    EXPECT_CONTAINS(differ(allreduce_of("x", f), allreduce_of("x", i)), "int32 on rank 1");
    EXPECT_CONTAINS(differ(allreduce_of("x", f), allreduce_of("x", f, ReduceOp::kMax)), "max");
    RequestPtr gather = request_of(OpKind::kAllgather, "x");
    add_vector(*gather, f);
    EXPECT_CONTAINS(differ(allreduce_of("x", f), gather), "allgather on rank 1");
    RequestPtr roots[2];
    for (int root = 0; root < 2; ++root) {
      roots[root] = request_of(OpKind::kBroadcast, "x");
      roots[root]->description.root = root;
      add_vector(*roots[root], f);
    }
    EXPECT_CONTAINS(differ(roots[0], roots[1]), "root");
    RequestPtr scaled = allreduce_of("x", f);
    scaled->description.prescale = 1e-7;
    EXPECT_CONTAINS(differ(allreduce_of("x", f), scaled), "1 on rank 0, 1e-07 on rank 1");
    RequestPtr two = allreduce_of("x", f);
    add_vector(*two, i);
    EXPECT_CONTAINS(differ(allreduce_of("x", f), two), "number of tensors");
    EXPECT_CONTAINS(differ(allreduce_of("", f), allreduce_of("", i)), "int32 on rank 1");
    EXPECT_EQ(sum_of_ones(world[rank], "x"), 2);
  });
}

TEST(Engine, SameNameTwiceInFlightIsRefused) {
  LoopbackWorld world(2);
  world.run([&](int rank) {
    std::vector<float> a{1}, b{1};
    const HandlePtr first = world[rank].submit(allreduce_of("x", a), Urgency::kWaited);
    const std::string text =
        error_of<UsageError>([&] { world[rank].submit(allreduce_of("x", b), Urgency::kWaited); });
    EXPECT_CONTAINS(text, "already in flight");
    finish(world[rank], first);
    EXPECT_EQ(sum_of_ones(world[rank], "x"), 2);
  });
}

RequestPtr bad_root(const std::string& name, std::vector<float>& values) {
  RequestPtr request = request_of(OpKind::kBroadcast, name);
  request->description.root = 7;
  add_vector(*request, values);
  return request;
}

// One rank's own mistake reaches the others as an error, not as a wait for ever.
TEST(Engine, RefusalOnOneRankFailsTheOthers) {
  LoopbackWorld world(3);
  world.run([&](int rank) {
    for (const char* name : {"x", ""}) {
      std::vector<float> data{1};
      const std::string text = error_of<UsageError>(
          [&] { call(world[rank], rank == 1 ? bad_root(name, data) : allreduce_of(name, data)); });
      EXPECT_CONTAINS(text, "root 7 is not in the process set of ranks 0, 1, 2");
      if (rank != 1) {
        EXPECT_CONTAINS(text, "rank 1");
      }
    }
    EXPECT_EQ(sum_of_ones(world[rank], "y"), 3);
  });
}

// The rank whose mistake it was knows at once and tries again before the others have failed.
TEST(Engine, RetryAfterARefusalMeetsTheOthersRetry) {
  for (const bool known : {false, true}) {
    LoopbackWorld world(2);
    world.run([&](int rank) {
      if (known) {
        EXPECT_EQ(sum_of_ones(world[rank], "x"), 2);
      }
      for (int round = 0; round < 5; ++round) {
        std::vector<float> data{1};
        const std::string text = error_of<UsageError>(
            [&] { call(world[rank], rank == 0 ? bad_root("x", data) : allreduce_of("x", data)); });
        EXPECT_CONTAINS(text, "root 7");
        EXPECT_EQ(sum_of_ones(world[rank], "x"), 2) << "round " << round;
      }
    });
  }
}

TEST(Engine, RefusalOnAllRanksDoesNotHarmTheRetry) {
  for (const bool known : {false, true}) {
    LoopbackWorld world(2);
    world.run([&](int rank) {
      if (known) {
        EXPECT_EQ(sum_of_ones(world[rank], "x"), 2);
      }
      for (int round = 0; round < 50; ++round) {
        std::vector<float> data{1};
        EXPECT_CONTAINS(error_of<UsageError>([&] { call(world[rank], bad_root("x", data)); }),
                        "root 7");
        ASSERT_EQ(sum_of_ones(world[rank], "x"), 2) << "round " << round;
      }
    });
  }
}

TEST(Engine, RefusesWhatHasNoMeaning) {
  LoopbackWorld world(1);
  const auto refusal = [&](OpKind kind, DType dtype, std::vector<int64_t> shape, ReduceOp op,
                           std::vector<int64_t> splits = {}) {
    RequestPtr request = request_of(kind, "x");
    request->description.op = op;
    request->description.add_tensor(dtype, shape);
    request->parts.resize(1);
    request->rows.push_back(shape.empty() ? 1 : shape[0]);
    request->splits = std::move(splits);
    const std::string text =
        error_of<UsageError>([&] { world[0].submit(request, Urgency::kWaited); });
    sum_of_ones(world[0], "");  // by now the refusal is dealt with, and the name free again
    return text;
  };
  const OpKind reduce = OpKind::kAllreduce, scatter = OpKind::kReducescatter;
  EXPECT_CONTAINS(refusal(reduce, DType::kI32, {1}, ReduceOp::kAdasum), "floating-point");
  EXPECT_CONTAINS(refusal(reduce, DType::kC64, {1}, ReduceOp::kMin), "complex64");
  EXPECT_CONTAINS(refusal(reduce, DType::kBool, {1}, ReduceOp::kAverage), "bool");
  EXPECT_CONTAINS(refusal(scatter, DType::kF32, {}, ReduceOp::kSum), "one dimension");
  EXPECT_CONTAINS(refusal(scatter, DType::kF32, {1}, ReduceOp::kAdasum), "Adasum");
  const OpKind swap = OpKind::kAlltoall;
  EXPECT_CONTAINS(refusal(swap, DType::kF32, {3}, ReduceOp::kSum, {2}), "add up to 2");
  EXPECT_CONTAINS(refusal(swap, DType::kF32, {3}, ReduceOp::kSum, {1, 2}), "2 numbers for 1");
  EXPECT_CONTAINS(refusal(swap, DType::kF32, {3}, ReduceOp::kSum, {-3}), "negative");
}

// More different requests than the engine remembers.
TEST(Engine, ForgottenRequestsTravelWhole) {
  LoopbackWorld world(2);
  world.run([&](int rank) {
    for (int round = 0; round < 2; ++round) {
      std::vector<std::vector<int32_t>> data;
      for (size_t i = 0; i < 4200; ++i) data.emplace_back(i, 1);
      std::vector<HandlePtr> handles;
      for (auto& values : data)
        handles.push_back(world[rank].submit(allreduce_of("", values), Urgency::kWaited));
      for (const HandlePtr& handle : handles) finish(world[rank], handle);
      for (const auto& values : data) ASSERT_EQ(values, std::vector<int32_t>(values.size(), 2));
    }
  });
}

TEST(Engine, BackgroundGivesWayAndIsCarriedOut) {
  LoopbackWorld world(3);
  world.run([&](int rank) {
    std::vector<std::vector<float>> values(20, std::vector<float>(1000, 1.0f + rank));
    for (int round = 0; round < 3; ++round) {
      std::vector<HandlePtr> handles;
      for (size_t i = 0; i < values.size(); ++i) {
        values[i].assign(1000, 1.0f + static_cast<float>(rank));
        auto request = request_of(OpKind::kAllreduce, "patient " + std::to_string(i));
        request->description.background = true;
        add_vector(*request, values[i]);
        handles.push_back(world[rank].submit(request, Urgency::kNow));
      }
      std::vector<float> now(1, 1.0f);
      auto request = request_of(OpKind::kAllreduce, "now");
      add_vector(*request, now);
      const HandlePtr first = world[rank].submit(request, Urgency::kWaited);
      ASSERT_TRUE(world[rank].wait(*first, kHangS));
      EXPECT_EQ(now[0], 3.0f);
      for (const HandlePtr& handle : handles) ASSERT_TRUE(world[rank].wait(*handle, kHangS));
      for (const auto& vector : values) EXPECT_EQ(vector, std::vector<float>(1000, 6.0f));
    }
  });
}

TEST(Engine, PeersMeetInRounds) {
  LoopbackWorld world(4);
  world.run([&](int rank) {
    for (int round = 0; round < 7; ++round) {
      std::vector<float> value(5, static_cast<float>(rank));
      auto request = request_of(OpKind::kAllreduce, "peers");
      request->description.peers = "shift_one:2";
      request->description.op = ReduceOp::kAverage;
      add_vector(*request, value);
      ASSERT_TRUE(world[rank].wait(*world[rank].submit(request, Urgency::kWaited), kHangS));
      const int peer = meeting({Peers::kShiftOne, 2 + round}, 4, rank).take_from.at(0);
      EXPECT_EQ(value, std::vector<float>(5, static_cast<float>(rank + peer) / 2)) << round;
    }
  });
}

// With nodes that are exact inside, and as peers count by their ranks.
TEST(Engine, NodesMeetAsPeers) {
  const NodeOf node_of{0, 1, 0, 0, 1};
  LoopbackWorld world(node_of);
  world.run([&](int rank) {
    for (const char* peers : {"shift_one", "ring"})
      for (int round = 0; round < 3; ++round) {
        std::vector<float> value(300, static_cast<float>(rank * (round + 1)));
        auto request = request_of(OpKind::kAllreduce, peers);
        request->description.peers = peers;
        request->description.op = ReduceOp::kAverage;
        request->description.exact_in_nodes = true;
        add_vector(*request, value);
        call(world[rank], request);
        EXPECT_EQ(value, std::vector<float>(300, static_cast<float>(2 * (round + 1)))) << peers;
      }
  });
}

TEST(Engine, RefusesWhatCodecsAndPeersCannotDo) {
  LoopbackWorld world(1);
  const auto problem = [&](ReduceOp op, const std::string& codec, const std::string& peers) {
    std::vector<float> value(1);
    auto request = request_of(OpKind::kAllreduce, "x");
    request->description.op = op;
    request->description.codec = codec;
    request->description.peers = peers;
    add_vector(*request, value);
    EXPECT_THROW(world[0].submit(request, Urgency::kNow), UsageError) << codec << peers;
  };
  problem(ReduceOp::kAdasum, "minmax_u8", "");
  problem(ReduceOp::kSum, "", "ring");
  problem(ReduceOp::kAverage, "minmax_u8", "shift_one");
}

}  // namespace
}  // namespace bagua
