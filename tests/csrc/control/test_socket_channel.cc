// The control channel over real sockets, between threads on this machine.
#include "control/socket_channel.h"

#include <gtest/gtest.h>

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
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
  std::string period(256, '\0'), bytes;
  for (size_t i = 0; i < period.size(); ++i)
    period[i] = static_cast<char>(i * 7 + static_cast<size_t>(seed));
  while (bytes.size() < nbytes) bytes += period;
  bytes.resize(nbytes);
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

}  // namespace
}  // namespace bagua
