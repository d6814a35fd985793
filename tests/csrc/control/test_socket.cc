#include "control/socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "common/clock.h"
#include "ranks.h"

namespace bagua {
namespace {

TEST(Socket, ChildrenOfForkKeepNoConnectionOpen) {
  int ends[2], until[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  ASSERT_EQ(::pipe(until), 0);
  const Socket theirs(ends[0]);
  Socket before(ends[1]);
  Socket mine(std::move(before));
  const int child = ::fork();
  if (child == 0) {
    char byte;
    ::close(until[1]);
    while (::read(until[0], &byte, 1) < 0 && errno == EINTR) {
    }
    ::_exit(mine.open() || ::fcntl(ends[1], F_GETFD) >= 0);
  }
  mine.close();
  pollfd waiting{theirs.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&waiting, 1, kHangS * 1000), 1) << "the child has a copy";
  char byte;
  EXPECT_EQ(::recv(theirs.fd(), &byte, 1, MSG_DONTWAIT), 0);
  ::close(until[0]);
  ::close(until[1]);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child's Socket seems open";
}

TEST(Socket, TheParentsStaysWhatItIs) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const Socket theirs(ends[0]), mine(ends[1]);
  const int child = ::fork();
  if (child == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  char byte = 0;
  EXPECT_TRUE(mine.write_all("!", 1, now_s() + kHangS));
  EXPECT_TRUE(theirs.read_all(&byte, 1, now_s() + kHangS));
  EXPECT_EQ(byte, '!');
}

}  // namespace
}  // namespace bagua
