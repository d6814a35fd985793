// The control channel over real sockets, between threads on this machine.
#include "control/socket_channel.h"

#include <gtest/gtest.h>

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <sstream>
#include <thread>

#include "common/clock.h"
#include "common/errors.h"
#include "common/memory.h"
#include "control/ring.h"
#include "ranks.h"

namespace bagua {
namespace {

constexpr int kMaxUs = 20 * 1000 * 1000;  // of one receive, where something must come

// Which ranks share memory with rank 0.
enum class Near { kNone, kOdd, kAll };

void with_channels(int n, Near near,
                   const std::function<void(int, std::unique_ptr<Channel>)>& body) {
  SocketListener listener(n, "");
  const auto memory = allocate_lines(2 * Ring::kNbytes * static_cast<size_t>(n));
  std::memset(memory.get(), 0, 2 * Ring::kNbytes * static_cast<size_t>(n));
  run_ranks(n, [&](int rank) {
    auto channel =
        rank == 0 ? accept_channel(listener, 30) : connect_channel(listener.address(), rank, 30);
    for (int peer = 1; peer < n; ++peer) {
      if (near == Near::kNone || (near == Near::kOdd && peer % 2 == 0)) continue;
      char* down = memory.get() + 2 * Ring::kNbytes * static_cast<size_t>(peer);
      char* up = down + Ring::kNbytes;
      if (rank == 0) channel->share(peer, down, up, memory);
      if (rank == peer) channel->share(0, up, down, memory);
    }
    body(rank, std::move(channel));
  });
}

std::unique_ptr<SocketChannel> accept_alone() {
  SocketListener listener(1, "");
  return accept_channel(listener, 1);
}

// Connects n ranks and runs `body` on each of their ends, in every way they may be connected.
void with_channels(int n, const std::function<void(int, std::unique_ptr<Channel>)>& body) {
  for (const Near near : {Near::kNone, Near::kOdd, Near::kAll}) {
    SCOPED_TRACE(static_cast<int>(near));
    with_channels(n, near, body);
  }
}

// Receives until `count` messages have come; a loss may come along with the last.
std::vector<Message> messages(Channel& channel, size_t count) {
  std::vector<Message> inbox;
  const double deadline_s = now_s() + 60;
  while (inbox.size() < count && now_s() < deadline_s) channel.receive(kMaxUs, inbox);
  EXPECT_GE(inbox.size(), count);
  inbox.resize(count);
  return inbox;
}

std::string pattern(size_t nbytes, int seed) {
  std::string bytes(nbytes, '\0');
  for (size_t i = 0; i < nbytes; ++i)
    bytes[i] = static_cast<char>(i * 7 + static_cast<size_t>(seed));
  return bytes;
}

TEST(SocketChannel, WorldOfOneConnectsToNobody) {
  const auto channel = accept_alone();
  std::vector<Message> inbox;
  channel->receive(0, inbox);
  EXPECT_TRUE(inbox.empty());
}

TEST(SocketChannel, MessagesKeepTheirBoundsOrderAndSender) {
  constexpr size_t kSizes[] = {0, 1, 3, 4, 5, 16383, 16384, 16385, 100000, 0, 1};
  with_channels(4, [&](int rank, std::unique_ptr<Channel> channel) {
    if (rank != 0) {
      for (const size_t size : kSizes) channel->send(0, pattern(size, rank));
      for (const Message& message : messages(*channel, 1)) {
        EXPECT_EQ(message.from, 0);
        EXPECT_EQ(message.bytes, pattern(70000, rank));
      }
      channel->send(0, "bye");
      messages(*channel, 1);
      return;
    }
    size_t next[4] = {};
    for (const Message& message : messages(*channel, 3 * std::size(kSizes))) {
      EXPECT_FALSE(message.lost);
      EXPECT_EQ(message.bytes, pattern(kSizes[next[message.from]++], message.from));
    }
    for (int peer = 1; peer < 4; ++peer) channel->send(peer, pattern(70000, peer));
    messages(*channel, 3);
    for (int peer = 1; peer < 4; ++peer) channel->send(peer, "bye");
  });
}

TEST(SocketChannel, SendNeverBlocksWhileThePeerIsSlow) {
  constexpr int kMany = 30;
  constexpr size_t kLarge = 1 << 20;
  std::atomic<bool> all_sent{false};
  with_channels(2, [&](int rank, std::unique_ptr<Channel> channel) {
    if (rank == 1) {
      while (!all_sent.exchange(false)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const auto inbox = messages(*channel, kMany);
      for (int i = 0; i < kMany; ++i)
        EXPECT_TRUE(inbox[static_cast<size_t>(i)].bytes == pattern(kLarge, i));
      channel->send(0, "got them");
      messages(*channel, 1);
      return;
    }
    for (int i = 0; i < kMany; ++i) channel->send(1, pattern(kLarge, i));
    all_sent = true;  // far more than the kernel takes, and nobody has read any
    EXPECT_EQ(messages(*channel, 1)[0].bytes, "got them");
    channel->send(1, "bye");
  });
}

TEST(SocketChannel, LargeMessagesBothWaysAtOnce) {
  with_channels(3, [&](int rank, std::unique_ptr<Channel> channel) {
    const size_t large = 8 << 20;
    if (rank != 0) {
      channel->send(0, pattern(large, rank));
      EXPECT_TRUE(messages(*channel, 1)[0].bytes == pattern(large, 0));
      channel->send(0, "done");
      messages(*channel, 1);
      return;
    }
    for (int peer = 1; peer < 3; ++peer) channel->send(peer, pattern(large, 0));
    int done = 0;
    for (const Message& message : messages(*channel, 4)) {
      const bool is_last = message.bytes == "done";
      done += is_last;
      EXPECT_TRUE(is_last || message.bytes == pattern(large, message.from));
    }
    EXPECT_EQ(done, 2);
    for (int peer = 1; peer < 3; ++peer) channel->send(peer, "done");
  });
}

// What was sent before the end arrives before the news of the loss, also when it is large.
TEST(SocketChannel, LossComesAfterTheLastMessage) {
  with_channels(3, [&](int rank, std::unique_ptr<Channel> channel) {
    if (rank == 1) return channel->send(0, pattern(100000, 1));
    if (rank == 2) {
      messages(*channel, 1);
      return;
    }
    const auto inbox = messages(*channel, 2);
    EXPECT_EQ(inbox[0].from, 1);
    EXPECT_TRUE(inbox[0].bytes == pattern(100000, 1));
    EXPECT_FALSE(inbox[0].lost);
    EXPECT_EQ(inbox[1].from, 1);
    EXPECT_TRUE(inbox[1].lost);
    channel->send(1, "to nobody");
    channel->send(2, "still here");
  });
}

TEST(SocketChannel, LossOfRankZeroIsSeenToo) {
  with_channels(3, [&](int rank, std::unique_ptr<Channel> channel) {
    if (rank == 0) return;
    EXPECT_TRUE(messages(*channel, 1)[0].lost);
  });
}

// Whole milliseconds would be far too coarse for what the engine does with them, so only the order
// of events is looked at: what must wake a sleeper does, and what must not does not.
class Sleeper : public testing::Test {
 protected:
  std::unique_ptr<Channel> channel = accept_alone();
  std::vector<Message> inbox;
  bool sleeps_through(const std::function<void()>& sleep, double limit_s) {
    const double began_s = now_s();
    sleep();
    return now_s() - began_s >= limit_s * 0.9;
  }
};

TEST_F(Sleeper, WakeEndsAReceiveNowOrTheNext) {
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    channel->wake();
  });
  EXPECT_FALSE(sleeps_through([&] { channel->receive(kMaxUs, inbox); }, 20));
  other.join();
  channel->wake();
  channel->wake();
  EXPECT_FALSE(sleeps_through([&] { channel->receive(kMaxUs, inbox); }, 20));
  // It took both, and sleeps again.
  EXPECT_TRUE(sleeps_through([&] { channel->receive(50000, inbox); }, 0.05));
  EXPECT_TRUE(inbox.empty());
}

TEST_F(Sleeper, WakeAfterADelay) {
  for (const int delay_us : {50000, 1, 0}) {
    channel->wake_after(delay_us);
    EXPECT_FALSE(sleeps_through([&] { channel->receive(5000000, inbox); }, 5)) << delay_us;
  }
  EXPECT_TRUE(sleeps_through([&] { channel->receive(50000, inbox); }, 0.05));
}

TEST_F(Sleeper, DozeLeavesTheWakeUpForReceive) {
  channel->wake();
  EXPECT_FALSE(sleeps_through([&] { channel->doze(kMaxUs); }, 20));
  EXPECT_FALSE(sleeps_through([&] { channel->doze(kMaxUs); }, 20));
  EXPECT_FALSE(sleeps_through([&] { channel->receive(kMaxUs, inbox); }, 20));
  EXPECT_TRUE(sleeps_through([&] { channel->doze(50000); }, 0.05));
}

TEST_F(Sleeper, HushKeepsTheDozerAsleepUntilItIsLifted) {
  channel->hush(true);
  channel->hush(true);
  channel->wake();
  EXPECT_TRUE(sleeps_through([&] { channel->doze(50000); }, 0.05));
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    channel->hush(false);
  });
  EXPECT_FALSE(sleeps_through([&] { channel->doze(kMaxUs); }, 20));
  other.join();
  channel->receive(0, inbox);  // takes the wake-up
  EXPECT_TRUE(sleeps_through([&] { channel->doze(50000); }, 0.05));
}

// ---- connecting --------------------------------------------------------------------------------

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
      const auto channel = connect_channel(listener.address(), 1, 60);
      return channel->send(0, "it is me");
    }
    const auto channel = accept_channel(listener, 60);
    EXPECT_EQ(messages(*channel, 1)[0].bytes, "it is me");
  });
  strangers.pop_back();
  for (const Socket& stranger : strangers) {
    char answer;
    EXPECT_FALSE(stranger.read_all(&answer, 1, now_s() + 5));
  }
}

// As a process has that was forked without the handlers that close them.
TEST(SocketChannel, ALostPeerIsToldOnceThoughItsSocketHasCopies) {
  std::atomic<bool> closed{false};
  with_channels(2, Near::kNone, [&](int rank, std::unique_ptr<Channel> channel) {
    if (rank == 1) {
      channel.reset();
      closed = true;
      return;
    }
    while (!closed) std::this_thread::yield();
    std::vector<int> copies;
    for (int fd = 3; fd < 256; ++fd) {
      struct stat about;
      if (::fstat(fd, &about) == 0 && S_ISSOCK(about.st_mode)) copies.push_back(::dup(fd));
    }
    std::vector<Message> inbox;
    const double until_s = now_s() + 60;
    while (inbox.empty() && now_s() < until_s) channel->receive(kMaxUs, inbox);
    EXPECT_TRUE(inbox.at(0).lost);
    inbox.clear();
    for (int i = 0; i < 3; ++i) channel->receive(1000, inbox);
    EXPECT_TRUE(inbox.empty());
    for (const int fd : copies) ::close(fd);
  });
}

TEST(SocketListener, NamesTheRanksThatDidNotConnect) {
  SocketListener listener(4, "");
  run_ranks(2, [&](int thread) {
    if (thread == 1) {
      try {
        connect_channel(listener.address(), 2, 30);
        ADD_FAILURE() << "it goes on alone";
      } catch (const PeerError& error) {
        EXPECT_NE(std::string(error.what()).find("another rank is not"), std::string::npos);
      }
      return;
    }
    try {
      accept_channel(listener, 1);
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
    connect_channel(address, 1, 0.5);
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
