// Rank 0 and the ranks of its machine meet in shared memory, over real sockets and loopback.
#include "engine/rings.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "common/clock.h"
#include "common/errors.h"
#include "ranks.h"
#include "transport/loopback.h"

namespace bagua {
namespace {

void with_channels(
    const std::vector<int>& node_of,
    const std::function<void(int, std::unique_ptr<SocketChannel>, Transport&)>& body) {
  const int n = static_cast<int>(node_of.size());
  LoopbackHub hub(n, node_of);
  SocketListener listener(n, "");
  run_ranks(n, [&](int rank) {
    auto channel = rank == 0 ? accept_channel(listener, kHangS)
                             : connect_channel(listener.address(), rank, kHangS);
    const auto transport = hub.connect(rank);
    body(rank, std::move(channel), *transport);
  });
}

Config waiting(double s) {
  Config config;
  config.start_timeout_s = s;
  config.carriers = "always";
  return config;
}

// Until so many messages have come.
std::vector<Message> messages_from(Channel& channel, size_t count) {
  std::vector<Message> inbox;
  for (const double late_s = now_s() + kHangS; inbox.size() < count && now_s() < late_s;)
    channel.receive(1000000, inbox);
  EXPECT_GE(inbox.size(), count);
  inbox.resize(count);
  return inbox;
}

// Until nobody's posts go by this rank.
void carry_on(Channel& channel) {
  std::vector<Message> rest;
  for (const double late_s = now_s() + kHangS; channel.carries() && now_s() < late_s;)
    channel.receive(1000000, rest);
  EXPECT_FALSE(channel.carries());
  EXPECT_TRUE(rest.empty());
}

std::string numbered(int rank, int number) {
  const std::string word = std::to_string(rank) + "/" + std::to_string(number) + " ";
  std::string text;
  for (int i = 0; i <= number * number * number; ++i) text += word;  // up to more than a ring holds
  return text;
}

class RingsOnEveryLayout : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Layouts, RingsOnEveryLayout,
                         testing::Values(std::vector<int>{0, 0}, std::vector<int>{0, 1},
                                         std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 1, 1},
                                         std::vector<int>{3, 1, 2, 1, 3, 1, 2}));

TEST_P(RingsOnEveryLayout, MessagesKeepTheirOrder) {
  constexpr int kMany = 30;
  const auto n = GetParam().size();
  with_channels(GetParam(), [&](int rank, std::unique_ptr<SocketChannel> channel, Transport& t) {
    share_rings(*channel, t, waiting(kForeverS));
    if (rank != 0) {
      for (int i = 0; i < kMany; ++i) channel->post({0}, numbered(rank, i));
      channel->send(0, "straight");
      int next = 0;
      // Those to all, those to every other rank, and one that was sent.
      const bool odd = rank % 2 == 1;
      for (const Message& message : messages_from(*channel, odd ? 2 * kMany + 1 : kMany + 1)) {
        EXPECT_EQ(message.from, 0);
        if (message.bytes == "straight") continue;
        EXPECT_EQ(message.bytes, numbered(odd ? next % 2 : 0, odd ? next / 2 : next));
        ++next;
      }
      channel->post({0}, "bye");
      EXPECT_EQ(messages_from(*channel, 1)[0].bytes, "bye");
      return carry_on(*channel);
    }
    std::vector<int> all, odd;
    for (int peer = 1; peer < static_cast<int>(n); ++peer) {
      all.push_back(peer);
      if (peer % 2 == 1) odd.push_back(peer);
    }
    for (int i = 0; i < kMany; ++i) {
      channel->post(all, numbered(0, i));
      channel->post(odd, numbered(1, i));
    }
    for (const int peer : all) channel->send(peer, "straight");
    std::vector<int> next(n);
    int byes = 0;
    for (const Message& message : messages_from(*channel, (n - 1) * (kMany + 2))) {
      if (message.bytes == "straight" || message.bytes == "bye") {
        byes += message.bytes == "bye";
        continue;
      }
      EXPECT_EQ(message.bytes, numbered(message.from, next[static_cast<size_t>(message.from)]++));
    }
    EXPECT_EQ(byes, static_cast<int>(n) - 1);
    channel->post(all, "bye");
    EXPECT_TRUE(messages_from(*channel, n - 1)[0].lost);
  });
}

TEST(Rings, NobodyIsCarriedAmongFewRanksOrWhereItIsNotWanted) {
  for (const char* carriers : {"auto", "never"})
    with_channels({0, 1, 1}, [&](int rank, std::unique_ptr<SocketChannel> channel, Transport& t) {
      Config config = waiting(kForeverS);
      config.carriers = carriers;
      share_rings(*channel, t, config);
      EXPECT_FALSE(channel->carries());
      EXPECT_EQ(channel->carrier_of(rank), rank);
      if (rank == 0) {
        messages_from(*channel, 2);
        return channel->post({1, 2}, "bye");
      }
      channel->post({0}, "here");
      EXPECT_EQ(messages_from(*channel, 1)[0].bytes, "bye");
    });
}

// Rank 1 carries 2, of which rank 0 knows straight.
TEST(Rings, RankZeroSeesTheLossOfWhomAnotherCarries) {
  with_channels({0, 1, 1}, [&](int rank, std::unique_ptr<SocketChannel> channel, Transport& t) {
    share_rings(*channel, t, waiting(kForeverS));
    if (rank == 2) return channel->post({0}, "last word");
    if (rank == 1) return carry_on(*channel);
    std::string heard;
    bool lost[3] = {};
    for (const Message& message : messages_from(*channel, 3)) {
      heard += message.bytes;
      if (message.lost) lost[message.from] = true;
    }
    EXPECT_TRUE(lost[1] && lost[2]);
    EXPECT_EQ(heard, "last word");
    EXPECT_TRUE(channel->all_ended());
  });
}

TEST(Rings, WhoIsCarriedHearsFromRankZeroThatItsCarrierIsLost) {
  with_channels({0, 1, 1, 1}, [&](int rank, std::unique_ptr<SocketChannel> channel, Transport& t) {
    share_rings(*channel, t, waiting(kForeverS));
    if (rank == 1) return channel.reset();
    if (rank == 0) {
      const Message lost = messages_from(*channel, 1)[0];
      EXPECT_EQ(lost.from, 1);
      EXPECT_TRUE(lost.lost);
      EXPECT_EQ(channel->carrier_of(3), 1);
      EXPECT_FALSE(channel->all_ended());
      channel->post({1, 2, 3}, "on its way to nobody");
      for (const int other : {2, 3}) channel->send(other, "rank 1 is gone");
      std::set<int> sent;
      std::vector<Message> inbox;
      for (const double late_s = now_s() + kHangS; sent.size() < 2 && now_s() < late_s;) {
        channel->receive(1000000, inbox);
        for (const Message& message : inbox)
          if (message.bytes == "sent") sent.insert(message.from);
      }
      EXPECT_EQ(sent, (std::set<int>{2, 3}));
      return;
    }
    channel->post({0}, "perhaps still on its way");
    EXPECT_EQ(messages_from(*channel, 1)[0].bytes, "rank 1 is gone");
    channel->post({0}, "on its way to nobody");
    channel->send(0, "sent");
  });
}

TEST(Rings, EveryoneSeesTheLossOfRankZeroOnce) {
  with_channels({0, 1, 1, 0}, [&](int rank, std::unique_ptr<SocketChannel> channel, Transport& t) {
    share_rings(*channel, t, waiting(kForeverS));
    if (rank == 0) {
      messages_from(*channel, 3);
      return channel.reset();
    }
    channel->post({0}, "have met");
    EXPECT_TRUE(messages_from(*channel, 1)[0].lost);
    EXPECT_FALSE(channel->carries());
    std::vector<Message> more;
    channel->receive(20000, more);
    EXPECT_TRUE(more.empty());
  });
}

class RankDiesBeforeItsOffer : public testing::TestWithParam<int> {};

TEST_P(RankDiesBeforeItsOffer, WhoWaitsForItHears) {
  const int dead = GetParam();
  with_channels({0, 0}, [&](int rank, std::unique_ptr<SocketChannel> channel, Transport& t) {
    if (rank == dead) return channel.reset();
    try {
      share_rings(*channel, t, waiting(kForeverS));
      ADD_FAILURE() << "nobody offered anything";
    } catch (const PeerError& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.find("rank " + std::to_string(dead) + " has failed or is gone"), 0u) << text;
    }
  });
}

// Whoever is missing on another machine; ranks that are threads cannot see that of each other.
TEST(Rings, RanksOfAnotherMachineHearThatRankZeroIsGone) {
  with_channels({0, 1, 1, 1}, [&](int rank, std::unique_ptr<SocketChannel> channel, Transport& t) {
    if (rank == 0 || rank == 2) return channel.reset();
    try {
      share_rings(*channel, t, waiting(kForeverS));
      ADD_FAILURE() << "nobody offered anything";
    } catch (const PeerError& error) {
      // Or the other one that has heard it is already gone, too.
      EXPECT_NE(std::string(error.what()).find("has failed or is gone"), std::string::npos)
          << error.what();
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
    EXPECT_THROW(share_rings(*channel, t, waiting(0.01)), PeerError);
    over = true;
  });
}

}  // namespace
}  // namespace bagua
