// How ranks find each other, over real sockets between threads on this machine.
#include "control/listener.h"

#include <gtest/gtest.h>

#include <sstream>

#include "common/clock.h"
#include "common/errors.h"
#include "ranks.h"

namespace bagua {
namespace {

struct Address {
  std::string secret;
  int port = 0;
  explicit Address(const std::string& text) { std::istringstream(text) >> secret >> port; }
};

TEST(SocketListener, StrangersAreRefused) {
  SocketListener listener(2, "");
  const Address address(listener.address());
  std::vector<Socket> strangers;
  const auto knock = [&](const std::string& hello) {
    strangers.push_back(connect_to({"127.0.0.1", address.port}, now_s() + 5));
    ASSERT_TRUE(strangers.back().open());
    ASSERT_TRUE(strangers.back().write_all(hello.data(), hello.size(), now_s() + 5));
  };
  const auto hello_of = [](const std::string& secret, int32_t rank) {
    return secret + std::string(reinterpret_cast<const char*>(&rank), sizeof rank);
  };
  knock("GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a scanner\r\n\r\n");
  knock(hello_of(std::string(address.secret.size(), '0'), 1));
  knock(hello_of(address.secret, 0));
  knock(hello_of(address.secret, 2));
  knock(hello_of(address.secret, -1));
  knock("");
  strangers.back().close();
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      const Socket socket = connect_to_listener(listener.address(), 0, 1, 60);
      EXPECT_TRUE(socket.write_all("it is me", 8, now_s() + 60));
      return;
    }
    const std::vector<Socket> sockets = listener.accept(60);
    char word[8];
    ASSERT_TRUE(sockets[1].read_all(word, sizeof word, now_s() + 60));
    EXPECT_EQ(std::string(word, sizeof word), "it is me");
  });
  strangers.pop_back();
  for (const Socket& stranger : strangers) {
    char answer;
    EXPECT_FALSE(stranger.read_all(&answer, 1, now_s() + 5));
  }
}

TEST(SocketListener, AnyRanksMeetInTheOrderGiven) {
  const std::vector<int> ranks{4, 9, 7};
  SocketListener listener(ranks, "lo");
  run_ranks(3, [&](int thread) {
    const int rank = ranks[static_cast<size_t>(thread)];
    if (rank != 4) {
      const Socket socket = connect_to_listener(listener.address(), 4, rank, 60);
      EXPECT_TRUE(socket.write_all(&rank, sizeof rank, now_s() + 60));
      return;
    }
    const std::vector<Socket> sockets = listener.accept(60);
    ASSERT_EQ(sockets.size(), 3u);
    EXPECT_FALSE(sockets[0].open());
    for (const size_t i : {1, 2}) {
      int who = -1;
      EXPECT_TRUE(sockets[i].read_all(&who, sizeof who, now_s() + 60));
      EXPECT_EQ(who, ranks[i]);
    }
  });
}

// Rank 2 never comes, so that who listens and who has connected would both wait for long.
TEST(SocketListener, WhoWaitsLooksWhetherItIsAnyUse) {
  SocketListener listener(3, "lo");
  const Look look = [] { throw PeerError("rank 2 is gone"); };
  run_ranks(2, [&](int rank) {
    try {
      if (rank == 0) {
        listener.accept(kHangS, look);
      } else {
        connect_to_listener(listener.address(), 0, 1, kHangS, look);
      }
      ADD_FAILURE() << "rank " << rank << " has met rank 2";
    } catch (const PeerError& error) {
      EXPECT_STREQ(error.what(), "rank 2 is gone");
    }
  });
}

TEST(SocketListener, NamesTheRanksThatDidNotConnect) {
  SocketListener listener(4, "");
  run_ranks(2, [&](int thread) {
    if (thread == 1) {
      try {
        connect_to_listener(listener.address(), 0, 2, 30);
        ADD_FAILURE() << "it goes on alone";
      } catch (const PeerError& error) {
        EXPECT_NE(std::string(error.what()).find("another rank is not"), std::string::npos);
      }
      return;
    }
    try {
      listener.accept(1);
      FAIL() << "ranks 1 and 3 never came";
    } catch (const PeerError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1, 3 did not connect"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("start_timeout_s"), std::string::npos)
          << error.what();
    }
  });
}

TEST(SocketListener, RankThatCannotConnectSaysSo) {
  std::string address;
  {
    SocketListener gone(2, "");
    address = gone.address();
  }
  try {
    connect_to_listener(address, 0, 1, 0.5);
    FAIL() << "nobody listens";
  } catch (const PeerError& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 could not connect to rank 0"),
              std::string::npos)
        << error.what();
  }
}

TEST(SocketListener, UnknownInterfaceIsTheUsersError) {
  EXPECT_THROW(SocketListener(2, "no-such-interface"), UsageError);
  EXPECT_NE(SocketListener(2, "lo").address().find("127.0.0.1"), std::string::npos);
}

TEST(SocketListener, SecretsAreNeverTheSame) {
  EXPECT_NE(Address(SocketListener(2, "").address()).secret,
            Address(SocketListener(2, "").address()).secret);
}

}  // namespace
}  // namespace bagua
