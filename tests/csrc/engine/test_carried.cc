// The engine over real sockets and rings, where on other nodes than rank 0's one rank carries the
// posts of all.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>

#include "engine/loopback_world.h"
#include "engine/rings.h"

namespace bagua {
namespace {

class CarriedWorld {
 public:
  explicit CarriedWorld(const NodeOf& node_of)
      : hub_(static_cast<int>(node_of.size()), node_of), engines_(node_of.size()) {
    Config config = quiet_config();
    config.start_timeout_s = kHangS;
    config.carriers = "always";
    SocketListener listener(size(), "");
    std::vector<std::string> names;
    for (int rank = 0; rank < size(); ++rank) names.push_back("host h" + std::to_string(rank));
    run([&](int rank) {
      auto channel = rank == 0 ? accept_channel(listener, kHangS)
                               : connect_channel(listener.address(), rank, kHangS);
      auto transport = hub_.connect(rank);
      share_rings(*channel, *transport, config);
      engines_[static_cast<size_t>(rank)] =
          std::make_unique<Engine>(config, std::move(transport), std::move(channel), names);
    });
  }
  int size() const { return static_cast<int>(engines_.size()); }
  Engine& operator[](int rank) { return *engines_[static_cast<size_t>(rank)]; }
  void run(const std::function<void(int)>& body) { run_ranks(size(), body); }
  // As a process that ends without a goodbye.
  void die(int rank) { engines_[static_cast<size_t>(rank)].reset(); }

 private:
  LoopbackHub hub_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

class Carried : public testing::TestWithParam<NodeOf> {};
INSTANTIATE_TEST_SUITE_P(Layouts, Carried,
                         testing::Values(NodeOf{0, 1, 1}, NodeOf{0, 0, 1, 1, 1},
                                         NodeOf{2, 1, 0, 1, 2, 0}),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(Carried, AgreesOnManyAndShutsDownInAnyOrder) {
  const int n = static_cast<int>(GetParam().size());
  for (int early = 0; early < n; ++early) {
    CarriedWorld world(GetParam());
    world.run([&](int rank) {
      std::vector<int64_t> others;
      for (int other = 0; other < n; ++other)
        if (other != early) others.push_back(other);
      for (int step = 0; step < 3; ++step)
        for (int i = 0; i < 10; ++i)
          EXPECT_EQ(sum_of_ones(world[rank], "x" + std::to_string(i)), n);
      const int32_t set = add_set(world[rank], others);
      for (int step = 0; step < 20 && rank != early; ++step)
        EXPECT_EQ(sum_of_ones(world[rank], "x", set), n - 1);
      world[rank].stop();
      ASSERT_TRUE(world[rank].wait_stopped(kHangS));
    });
  }
}

TEST_P(Carried, ErrorsAreThoseOfTheRanksThatCauseThem) {
  const int n = static_cast<int>(GetParam().size());
  CarriedWorld world(GetParam());
  world.run([&](int rank) {
    std::vector<float> values(rank == n - 1 ? 3 : 2);
    EXPECT_CONTAINS(error_of<UsageError>([&] { call(world[rank], allreduce_of("x", values)); }),
                    "on rank " + std::to_string(n - 1));
    EXPECT_EQ(sum_of_ones(world[rank], "y"), n);
    world[rank].stop();
    ASSERT_TRUE(world[rank].wait_stopped(kHangS));
  });
}

TEST_P(Carried, WhoIsKilledIsNamedToAll) {
  const int n = static_cast<int>(GetParam().size());
  for (int dead = 0; dead < n; ++dead) {
    CarriedWorld world(GetParam());
    world.run([&](int rank) {
      const auto sum = [&] { EXPECT_EQ(sum_of_ones(world[rank], "x"), n); };
      if (rank == dead) {
        for (int step = 0; step < dead; ++step) sum();
        return world.die(rank);
      }
      const std::string text = error_of<PeerError>([&] {
        for (;;) sum();
      });
      EXPECT_CONTAINS(text, "rank " + std::to_string(dead) + " (host h" + std::to_string(dead));
    });
  }
}

bool carries(const NodeOf& node_of, int rank) {
  const auto first = std::find(node_of.begin(), node_of.end(), node_of[static_cast<size_t>(rank)]);
  return first != node_of.begin() && first - node_of.begin() == rank;
}

int carrier_in(const NodeOf& node_of) {
  int rank = 1;
  while (!carries(node_of, rank)) ++rank;
  return rank;
}

// Which others would not hear of otherwise: what they say goes by it, and it has said goodbye.
TEST_P(Carried, ACarrierThatEndsAheadOfThoseItCarriesIsNamed) {
  const int n = static_cast<int>(GetParam().size());
  const int carrier = carrier_in(GetParam());
  CarriedWorld world(GetParam());
  world.run([&](int rank) {
    std::vector<int64_t> others;
    for (int other = 0; other < n; ++other)
      if (other != carrier) others.push_back(other);
    const int32_t set = add_set(world[rank], others);
    if (rank == carrier) {
      world[rank].stop();
      EXPECT_FALSE(world[rank].wait_stopped(0.5));  // it carries
      return world.die(rank);
    }
    const std::string text = error_of<PeerError>([&] {
      for (;;) EXPECT_EQ(sum_of_ones(world[rank], "x", set), n - 1);
    });
    EXPECT_CONTAINS(text, "rank " + std::to_string(carrier) + " (host h");
    EXPECT_CONTAINS(text, "and messages of other ranks of its machine went by it");
  });
}

// Rank 1 carries 2 and 3. Only rank 0 has an engine; the others say what theirs would.
void with_engine_of_rank_zero(double peer_timeout_s,
                              const std::function<void(int, SocketChannel&)>& others,
                              const std::function<void(Engine&)>& zero) {
  Config config = quiet_config();
  config.start_timeout_s = kHangS;
  config.carriers = "always";
  config.peer_timeout_s = peer_timeout_s;
  LoopbackHub hub(4, {0, 1, 1, 1});
  SocketListener listener(4, "");
  run_ranks(4, [&](int rank) {
    auto channel = rank == 0 ? accept_channel(listener, kHangS)
                             : connect_channel(listener.address(), rank, kHangS);
    auto transport = hub.connect(rank);
    share_rings(*channel, *transport, config);
    if (rank != 0) return others(rank, *channel);
    Engine engine(config, std::move(transport), std::move(channel), {"h0", "h1", "h2", "h3"});
    zero(engine);
  });
}

// Passes on what there is, and answers pings, until `over`.
void serve(SocketChannel& channel, const std::atomic<bool>& over) {
  std::vector<Message> inbox;
  while (!over) {
    inbox.clear();
    channel.receive(1000, inbox);
    for (const Message& message : inbox)
      if (!message.lost && Reader(message.bytes).get<MessageType>() == MessageType::kPing)
        channel.send(0, text_message(MessageType::kPong));
  }
}

TEST(Goodbyes, ARankThatEndsAheadOfItsGoodbyeHasNotFailed) {
  std::atomic<bool> over{false};
  with_engine_of_rank_zero(
      60,
      [&](int rank, SocketChannel& channel) {
        if (rank == 2) return channel.send(0, text_message(MessageType::kLeaving));
        serve(channel, over);
      },
      [&](Engine& engine) {
        const std::string text = error_of<PeerError>([&] { sum_of_ones(engine, "x"); });
        EXPECT_CONTAINS(text, "x: rank 2 has shut down");
        EXPECT_FALSE(engine.failure());
        over = true;
      });
}

TEST(Goodbyes, ACarrierThatIsSilentAfterItsOwnIsNamed) {
  std::atomic<bool> over{false};
  with_engine_of_rank_zero(
      1,
      [&](int rank, SocketChannel& channel) {
        if (rank != 1) return serve(channel, over);
        channel.send(0, text_message(MessageType::kLeaving));
        channel.post({0}, text_message(MessageType::kBye));
        std::vector<Message> inbox;
        while (inbox.empty()) channel.receive(1000, inbox);  // rank 0's answer
        while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      },
      [&](Engine& engine) {
        engine.stop();  // who leaves looks whether the others are alive
        EXPECT_TRUE(engine.wait_stopped(kHangS));
        ASSERT_TRUE(engine.failure());
        EXPECT_CONTAINS(engine.failure()->what, "rank 1 (h1) has not answered for 1 s");
        EXPECT_CONTAINS(engine.failure()->what, "other ranks of its machine went by it");
        over = true;
      });
}

// Each handle has the sum or an error, and every rank comes to its end.
TEST_P(Carried, StopRightAfterSubmitting) {
  const int n = static_cast<int>(GetParam().size());
  std::vector<int64_t> node;
  for (int rank = 0; rank < n; ++rank)
    if (GetParam()[static_cast<size_t>(rank)] ==
        GetParam()[static_cast<size_t>(carrier_in(GetParam()))])
      node.push_back(rank);
  for (int round = 0; round < 30; ++round) {
    CarriedWorld world(GetParam());
    world.run([&](int rank) {
      const int32_t set = add_set(world[rank], node);
      const bool inside = std::find(node.begin(), node.end(), rank) != node.end();
      std::vector<float> data(5000, 1);
      HandlePtr handle;
      if (inside)
        handle = world[rank].submit(allreduce_of("x", data, ReduceOp::kSum, set), Urgency::kNow);
      for (int spin = 0; spin < round * rank * 50; ++spin) std::this_thread::yield();
      world[rank].stop();
      ASSERT_TRUE(world[rank].wait_stopped(kHangS)) << "rank " << rank << ", round " << round;
      if (!inside) return;
      ASSERT_TRUE(handle->done());
      try {
        handle->rethrow();
        EXPECT_EQ(data[4999], static_cast<float>(node.size()));
      } catch (const Error& error) {
        EXPECT_CONTAINS(error.what(), "shut down");
      }
    });
  }
}

}  // namespace
}  // namespace bagua
