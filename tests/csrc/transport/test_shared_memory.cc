#include "transport/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>

#include "common/errors.h"

namespace bagua {
namespace {

TEST(Segment, IsSeenByWhoeverMapsIt) {
  Segment mine(10000);
  EXPECT_EQ(mine.nbytes(), 12288u);
  const int pid = ::getpid();
  const int child = ::fork();
  if (child == 0) {
    Segment theirs(pid, mine.card());
    std::memcpy(mine.data() + 9000, "mine", 5);  // a copy
    std::memcpy(theirs.data() + 9000, "word", 5);
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_STREQ(mine.data() + 9000, "word");
}

TEST(Segment, BeginsWhereAHugePageCan) {
  for (const size_t nbytes : {size_t{2} << 20, (size_t{16} << 20) + 4096}) {
    Segment mine(nbytes, nbytes);
    EXPECT_EQ(reinterpret_cast<size_t>(mine.data()) % (2 << 20), 0u);
    std::memset(mine.data(), 1, nbytes);  // all of it is there
  }
}

TEST(Segment, OfThisProcessOutlivesItsMaker) {
  auto mine = std::make_unique<Segment>(10000);
  const Segment::Card card = mine->card();
  const Segment theirs(::getpid(), card);
  std::memcpy(mine->data(), "word", 5);
  EXPECT_EQ(mine->data(), theirs.data()) << "for ThreadSanitizer";
  mine.reset();
  EXPECT_STREQ(theirs.data(), "word");
  EXPECT_THROW(Segment(::getpid(), card), PeerError);
}

TEST(Segment, OfAProcessThatIsGoneIsAPeerError) {
  EXPECT_THROW(Segment(::getpid(), {1 << 20, 4096, 0, 0}), PeerError);
}

TEST(Segment, WhatIsNoSuchMemoryIsAPeerError) {
  const auto card_of = [](int fd, size_t nbytes) {
    struct stat file{};
    EXPECT_EQ(::fstat(fd, &file), 0);
    return Segment::Card{fd, nbytes, file.st_dev, file.st_ino};
  };
  const int shorter = ::memfd_create("shorter", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(shorter, 4096), 0);
  const Segment::Card right = card_of(shorter, 4096);
  EXPECT_NO_THROW(Segment(::getpid(), right));
  EXPECT_THROW(Segment(::getpid(), card_of(shorter, 8192)), PeerError) << "it would be SIGBUS";
  // The number has been given to another file since.
  const int other = ::memfd_create("other", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(other, 4096), 0);
  ::dup2(other, shorter);
  EXPECT_THROW(Segment(::getpid(), right), PeerError);
  const int unlike = ::socket(AF_UNIX, SOCK_STREAM, 0);
  ::dup2(unlike, shorter);
  EXPECT_THROW(Segment(::getpid(), right), PeerError);
  ::close(unlike);
  ::close(shorter);
  ::close(other);
}

// Pages of it are this process's own, whoever was about to write there, and whoever is forked.
TEST(Segment, WhatIsTakenBackStaysAsItIs) {
  constexpr size_t kPage = 4096;
  Segment mine(16 * kPage);
  std::memset(mine.data(), 1, mine.nbytes());
  ASSERT_TRUE(mine.take_back(3 * kPage + 100, 2 * kPage));  // some of three pages
  ASSERT_TRUE(mine.take_back(5 * kPage, 2 * kPage));        // of which one is its own already
  mine.data()[5 * kPage] = 2;
  const int pid = ::getpid();
  const auto in_child = [&](auto work) {
    const int child = ::fork();
    if (child == 0) ::_exit(work() ? 0 : 1);
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  };
  in_child([&] {
    Segment theirs(pid, mine.card());
    std::memset(theirs.data(), 7, theirs.nbytes());
    return true;
  });
  for (size_t page = 0; page < 16; ++page) {
    const bool own = page >= 3 && page < 7;
    EXPECT_EQ(mine.data()[page * kPage], !own ? 7 : page == 5 ? 2 : 1) << page;
  }
  in_child([&] {
    const bool same = mine.data()[5 * kPage] == 2 && mine.data()[4 * kPage] == 1;
    std::memset(mine.data(), 9, mine.nbytes());
    return same;
  });
  EXPECT_EQ(mine.data()[5 * kPage], 2);
  EXPECT_EQ(mine.data()[0], 7);
}

#ifndef __SANITIZE_THREAD__  // which needs more memory than the limit leaves
// It would write to its parent's memory otherwise.
TEST(Segment, AChildWithoutMemoryForACopyTouchesNothing) {
  Segment mine(size_t{64} << 20);
  std::memset(mine.data(), 1, mine.nbytes());
  const int child = ::fork();
  if (child == 0) {
    // In the child of this one, as the limit is one that a process cannot be rid of.
    const rlimit none{size_t{32} << 20, size_t{32} << 20};
    ::setrlimit(RLIMIT_DATA, &none);
    const int grandchild = ::fork();
    if (grandchild == 0) {
      ::signal(SIGSEGV, SIG_DFL);
      std::memset(mine.data(), 9, 1);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(grandchild, &status, 0);
    ::_exit(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(mine.data()[0], 1);
}
#endif

TEST(Segment, TooLargeIsAnErrorBeforeAnythingIsMade) {
  try {
    Segment segment(size_t{1} << 60);
    FAIL() << "an exabyte was mapped";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("cannot have " + std::to_string(size_t{1} << 60) + " bytes"), 0u) << text;
  }
}

// Of a child that may have less than its parent; a limit is for ever. What went wrong comes back.
std::string error_in_child(int resource, rlim_t limit, size_t nbytes) {
  // What UBSan learns of types it learns with a pipe, which the child may not have any more.
  try {
    Segment known(1);
    throw UsageError("known");
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "known");
  }
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const int child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);  // as Python does
    const rlimit less{limit, limit};
    std::string text = ::setrlimit(resource, &less) == 0 ? "no error" : "no limit";
    try {
      Segment segment(nbytes);
    } catch (const UsageError& error) {
      text = error.what();
    }
    ::_exit(::write(ends[1], text.data(), text.size()) < 0);
  }
  ::close(ends[1]);
  char text[1000];
  const ssize_t n = ::read(ends[0], text, sizeof text);
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  return {text, static_cast<size_t>(std::max<ssize_t>(n, 0))};
}

// The bytes of this process's address space.
rlim_t mapped_nbytes() {
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
}

TEST(Segment, BeyondAUlimitIsAnErrorThatNamesIt) {
  const std::string file = error_in_child(RLIMIT_FSIZE, 8192, 10000);
  EXPECT_EQ(file,
            "cannot make 12288 bytes of shared memory: File too large (see ulimit -f, 8192); "
            "transport='mpi' does without");
  EXPECT_EQ(error_in_child(RLIMIT_FSIZE, 12288, 10000), "no error");
  const std::string files = error_in_child(RLIMIT_NOFILE, 0, 10000);
  EXPECT_EQ(files,
            "cannot make 12288 bytes of shared memory: Too many open files (see ulimit -n, 0); "
            "transport='mpi' does without");
  const rlim_t space = mapped_nbytes() + (rlim_t{16} << 20);
  EXPECT_EQ(error_in_child(RLIMIT_AS, space, size_t{64} << 20),
            "cannot map 67108864 bytes of shared memory: Cannot allocate memory (see ulimit -v, " +
                std::to_string(space) + "); transport='mpi' does without");
}

TEST(Arenas, GiveAlignedZerosAndKnowTheirPlaces) {
  auto arenas = std::make_shared<Arenas>();
  auto a = arenas->allocate(100);
  auto b = arenas->allocate(0);
  auto c = arenas->allocate(size_t{20} << 20);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.get()) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.get()) % 64, 0u);
  EXPECT_EQ(arenas->find(a.get(), 100).segment, 0u);
  EXPECT_EQ(arenas->find(a.get() + 7, 1).offset, 7u);
  EXPECT_EQ(arenas->find(c.get(), size_t{20} << 20).segment, 1u) << "more than a segment holds";
  const char elsewhere = 0;
  EXPECT_TRUE(arenas->find(&elsewhere, 1).nowhere());
  EXPECT_TRUE(arenas->find(c.get(), size_t{40} << 20).nowhere()) << "beyond the end";
}

TEST(Arenas, MemoryGivenBackIsZerosAgain) {
  auto arenas = std::make_shared<Arenas>();
  for (const size_t nbytes : {size_t{64}, size_t{5000}, size_t{100000}}) {
    auto before = arenas->allocate(64);
    char* where;
    {
      auto piece = arenas->allocate(nbytes);
      where = piece.get();
      std::memset(where, 'x', nbytes);
    }
    auto again = arenas->allocate(nbytes);
    EXPECT_EQ(again.get(), where);
    EXPECT_TRUE(std::all_of(where, where + nbytes, [](char c) { return c == 0; })) << nbytes;
  }
}

TEST(Arenas, RandomTakingAndGivingNeverOverlapsAndReturnsEverything) {
  auto arenas = std::make_shared<Arenas>();
  std::mt19937 random(7);
  struct Piece {
    std::shared_ptr<char> data;
    size_t nbytes;
    char mark;
  };
  std::vector<Piece> pieces;
  for (int step = 0; step < 2000; ++step) {
    if (pieces.size() < 20 || random() % 2) {
      const size_t nbytes = 1 + random() % (random() % 4 ? 300 : 200000);
      auto data = arenas->allocate(nbytes);
      ASSERT_EQ(std::string(data.get(), nbytes), std::string(nbytes, '\0'));
      const char mark = static_cast<char>(1 + step % 100);
      std::memset(data.get(), mark, nbytes);
      pieces.push_back({data, nbytes, mark});
    } else {
      const size_t at = random() % pieces.size();
      const Piece& one = pieces[at];
      ASSERT_EQ(std::string(one.data.get(), one.nbytes), std::string(one.nbytes, one.mark));
      pieces.erase(pieces.begin() + static_cast<long>(at));
    }
    if (pieces.size() > 60) pieces.erase(pieces.begin(), pieces.begin() + 30);
  }
  pieces.clear();
  EXPECT_EQ(arenas->segment_count(), 1u);
  const auto all = arenas->allocate(size_t{16} << 20);
  EXPECT_EQ(arenas->segment_count(), 1u) << "the pieces have not become one again";
}

TEST(Arenas, WhatIsForGoodIsNothingElsesThoughNobodyHasIt) {
  const auto arenas = std::make_shared<Arenas>();
  auto first = arenas->allocate_for_good(1000);
  char* data = first.get();
  std::fill(data, data + 1000, char{7});
  first.reset();
  const auto next = arenas->allocate(1000);
  EXPECT_NE(next.get(), data);
  EXPECT_TRUE(std::all_of(data, data + 1000, [](char c) { return c == 7; }));
}

}  // namespace
}  // namespace bagua
