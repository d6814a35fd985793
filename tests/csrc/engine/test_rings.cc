// Rank 0 and the ranks of its machine meet in shared memory, over real sockets and loopback.
#include "engine/rings.h"

#include <gtest/gtest.h>

#include <atomic>

#include "common/errors.h"
#include "ranks.h"
#include "transport/loopback.h"

namespace bagua {
namespace {

constexpr double kForeverS = 10 * kHangS;

void with_channels(
    const std::vector<int>& node_of,
    const std::function<void(int, std::unique_ptr<SocketChannel>, Transport&)>& body) {
  const int n = static_cast<int>(node_of.size());
  LoopbackHub hub(n, node_of);
  SocketListener listener(n, "");
  run_ranks(n, [&](int rank) {
    auto channel =
        rank == 0 ? listener.accept(kHangS) : connect_channel(listener.address(), rank, kHangS);
    const auto transport = hub.connect(rank);
    body(rank, std::move(channel), *transport);
  });
}

TEST(Rings, CarryMessagesOnTheMachineOfRankZeroAndSocketsElsewhere) {
  with_channels({0, 0, 1, 1}, [&](int rank, std::unique_ptr<SocketChannel> channel, Transport& t) {
    share_rings(*channel, t, kForeverS);
    std::vector<Message> inbox;
    if (rank != 0) {
      channel->send(0, std::to_string(rank));
      while (inbox.empty()) channel->receive(-1, inbox);
      EXPECT_EQ(inbox[0].bytes, "all");
      return;
    }
    while (inbox.size() < 3) channel->receive(-1, inbox);
    for (const Message& message : inbox) EXPECT_EQ(message.bytes, std::to_string(message.from));
    for (int peer = 1; peer < 4; ++peer) channel->send(peer, "all");
  });
}

class RankDiesBeforeItsOffer : public testing::TestWithParam<int> {};

TEST_P(RankDiesBeforeItsOffer, WhoWaitsForItHears) {
  const int dead = GetParam();
  with_channels({0, 0}, [&](int rank, std::unique_ptr<SocketChannel> channel, Transport& t) {
    if (rank == dead) return channel.reset();
    try {
      share_rings(*channel, t, kForeverS);
      ADD_FAILURE() << "nobody offered anything";
    } catch (const PeerError& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.find("rank " + std::to_string(dead) + " has failed or is gone"), 0u) << text;
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Either, RankDiesBeforeItsOffer, testing::Values(0, 1));

TEST(Rings, ARankThatOffersNothingInTimeIsNamed) {
  std::atomic<bool> over{false};
  with_channels({0, 0}, [&](int rank, std::unique_ptr<SocketChannel> channel, Transport& t) {
    if (rank == 1) {
      while (!over) std::this_thread::yield();
      return;
    }
    EXPECT_THROW(share_rings(*channel, t, 0.01), PeerError);
    over = true;
  });
}

}  // namespace
}  // namespace bagua
