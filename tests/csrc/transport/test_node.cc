#include "transport/node.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>

#include "common/clock.h"
#include "common/memory.h"
#include "ranks.h"
#include "transport/loopback.h"

namespace bagua {
namespace {

constexpr int kForeverUs = kForeverS * 1000000;

// The ranks of one machine, as far as they are threads.
class Nodes {
 public:
  explicit Nodes(int size) : hub_(size, std::vector<int>(static_cast<size_t>(size), 0)) {
    for (int rank = 0; rank < size; ++rank) ends_.push_back(hub_.connect(rank));
  }
  Node& operator[](int rank) { return *ends_[static_cast<size_t>(rank)]->node(); }
  void end(int rank) { ends_[static_cast<size_t>(rank)].reset(); }

 private:
  LoopbackHub hub_;
  std::vector<std::unique_ptr<Transport>> ends_;
};

Note numbered(int64_t number) { return {{}, number}; }

// Counts begin a hundred words before the end of what they can count, so all of this wraps.
TEST(Words, AreHeardOnceEachWithTheirNotes) {
  Nodes nodes(3);
  for (int i = 0; i < 300; ++i) {
    EXPECT_FALSE(nodes[1].heard(0)) << i;
    nodes[0].tell(1, numbered(i));
    EXPECT_FALSE(nodes[2].heard(0)) << i;
    EXPECT_FALSE(nodes[1].heard(2)) << i;
    ASSERT_TRUE(nodes[1].heard(0)) << i;
    EXPECT_EQ(nodes[1].note_of(0).number, i);
  }
}

TEST(Words, OneAheadKeepsTheNoteBefore) {
  Nodes nodes(2);
  for (int i = 0; i < 300; ++i) {
    nodes[0].tell(1, numbered(2 * i));
    nodes[0].tell(1, numbered(2 * i + 1));
    for (int k = 0; k < 2; ++k) {
      ASSERT_TRUE(nodes[1].heard(0)) << i;
      EXPECT_EQ(nodes[1].note_of(0).number, 2 * i + k);
    }
    ASSERT_FALSE(nodes[1].heard(0)) << i;
  }
}

// ---- sleeping ----------------------------------------------------------------------------------

void hear(Node& node, int peer) {
  while (!node.heard(peer)) node.sleep(kForeverUs);
}

void take_turns(Node& node, int me, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    if (i % 2 == me) {
      node.tell(1 - me, numbered(i));
    } else {
      hear(node, 1 - me);
      if (node.note_of(1 - me).number != i) throw std::runtime_error("another word's note");
    }
  }
}

// Left alone, two threads that wake each other share a core.
void keep_to_core(int number) {
  cpu_set_t all, one;
  ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
  number %= CPU_COUNT(&all);
  int core = 0;
  while (!CPU_ISSET(core, &all) || number-- > 0) ++core;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
}

// Both begin a round together, so that one speaks just when the other is about to fall asleep.
TEST(Sleep, NoWakeUpIsLost) {
  Nodes nodes(2);
  std::atomic<int> round{-1};
  run_ranks(2, [&](int rank) {
    keep_to_core(rank);
    std::minstd_rand random(static_cast<unsigned>(rank + 1));
    const auto dally = [&] {
      for (unsigned n = random() % 20; n > 0; --n) cpu_relax();
    };
    for (int i = 0; i < 50000; ++i) {
      if (rank == 0) {
        for (int n = 1; round < i; ++n) n % 1000 ? cpu_relax() : std::this_thread::yield();
        dally();
        nodes[0].tell(1, numbered(i));
      } else {
        round = i;
        dally();
        hear(nodes[1], 0);
        ASSERT_EQ(nodes[1].note_of(0).number, i);
      }
    }
  });
}

TEST(Sleep, EndsByTheWordOfThePeerThatIsAwaited) {
  Nodes nodes(3);
  run_ranks(3, [&](int rank) {
    for (int i = 0; i < 3000; ++i)
      for (int step = 1; step < 3; ++step) {
        nodes[rank].tell((rank + step) % 3, numbered(i));
        hear(nodes[rank], (rank + 3 - step) % 3);
        ASSERT_EQ(nodes[rank].note_of((rank + 3 - step) % 3).number, i);
      }
  });
}

TEST(Sleep, DoesNotBeginWhenTheWordIsThere) {
  Nodes nodes(2);
  run_ranks(1, [&](int) {
    nodes[0].tell(1);
    EXPECT_FALSE(nodes[1].heard(1)) << "nobody speaks to itself";
    EXPECT_TRUE(nodes[1].heard(0));
    EXPECT_FALSE(nodes[1].heard(0));
    nodes[0].tell(1);
    nodes[1].sleep(kForeverUs);
    EXPECT_TRUE(nodes[1].heard(0));
  });
}

// ---- between processes -------------------------------------------------------------------------

// Runs body on two ranks, of which 1 is a child of this process.
void with_processes(const std::function<void(Node&, int)>& body) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
  const auto run = [&](int me) {
    const auto exchange = [&](const std::string& mine) {
      char theirs[1000];
      const ssize_t sent = ::send(ends[me], mine.data(), mine.size() + 1, MSG_NOSIGNAL);
      const ssize_t n = ::recv(ends[me], theirs, sizeof theirs, 0);
      if (sent < 1 || n < 1) throw std::runtime_error("the other process has failed");
      std::vector<std::string> all(2, mine);
      all[static_cast<size_t>(1 - me)].assign(theirs, static_cast<size_t>(n) - 1);
      return all;
    };
    std::string why_not;
    const auto node = Node::meet({4, 7}, me == 0 ? 4 : 7, exchange, why_not);
    if (!node) throw std::runtime_error(why_not);
    body(*node, me);
  };
  const int child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(ends[0]);
    try {
      run(1);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank 1: %s\n", error.what());
      ::_exit(1);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  run_ranks(1, [&](int) { run(0); });
  ::close(ends[0]);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Processes, WakeEachOther) {
  with_processes([](Node& node, int me) { take_turns(node, me, 20000); });
}

TEST(Processes, KnowTheirRanks) {
  with_processes([](Node& node, int me) {
    if (node.size() != 2 || node.first_rank() != 4 || node.rank_of(1) != 7 ||
        node.index_of(7) != 1 || node.index_of(5) != -1)
      throw std::runtime_error("not the ranks that met");
    take_turns(node, me, 2);
  });
}

// A larger stage is a segment of its own; the largest takes the number of the one before.
TEST(Processes, SeeEachOthersMemoryWhereverItMovesTo) {
  with_processes([](Node& node, int me) {
    char mark = 1;
    uint32_t segments[3], generations[3];
    for (const size_t nbytes : {size_t{1000}, size_t{20} << 20, size_t{40} << 20}) {
      Place place;
      if (me == 0) {
        char* mine = node.stage(nbytes);
        mine[nbytes - 1] = mark;
        place = node.arenas()->find(mine, nbytes);
        node.tell(1, {place, static_cast<int64_t>(nbytes)});
        hear(node, 1);
        if (mine[0] != mark + 1) throw std::runtime_error("rank 1 has written elsewhere");
      } else {
        hear(node, 0);
        place = node.note_of(0).place;
        char* theirs = node.at(0, place);
        if (theirs[nbytes - 1] != mark) throw std::runtime_error("rank 0 has written elsewhere");
        theirs[0] = static_cast<char>(mark + 1);
        node.tell(0);
      }
      segments[mark - 1] = place.segment;
      generations[mark - 1] = place.generation;
      ++mark;
    }
    if (segments[2] != segments[1] || generations[2] == generations[1])
      throw std::runtime_error("the largest stage should lie where the second was");
  });
}

// ---- meeting -----------------------------------------------------------------------------------

// What rank 3, the first of two, makes of the card of the other, made by `tamper` from its own, and
// of what the other then says.
std::string why_not(const std::function<void(std::string&)>& tamper,
                    const std::string& their_problem = "") {
  int round = 0;
  std::string why_not;
  const auto node = Node::meet(
      {3, 5}, 3,
      [&](const std::string& mine) {
        std::string theirs = round++ == 0 ? mine : their_problem;
        if (round == 1) tamper(theirs);
        return std::vector<std::string>{mine, theirs};
      },
      why_not);
  EXPECT_EQ(node == nullptr, !why_not.empty());
  return why_not;
}

void put_number(std::string& card, size_t index, int64_t number) {
  std::memcpy(card.data() + index * sizeof number, &number, sizeof number);
}

TEST(Meet, AllSeeEachOtherOrNobodyDoes) {
  EXPECT_EQ(why_not([](std::string&) {}), "");
  EXPECT_EQ(why_not([](std::string&) {}, "cannot open"), "rank 5: cannot open");
}

TEST(Meet, WhoHasNoMemorySaysWhy) {
  EXPECT_EQ(why_not([](std::string& card) { card.clear(); }, "no memory"), "rank 5: no memory");
}

TEST(Meet, AProcessThatCannotBeSeenIsNamed) {
  const std::string process = "rank 3: process " + std::to_string(::getpid());
  // A card: process, descriptor, bytes, two numbers of the file, and what proves that it is the
  // rank's.
  EXPECT_EQ(why_not([](std::string& card) { put_number(card, 1, 1 << 20); }),
            process + " is gone, or of another container");
  EXPECT_EQ(why_not([](std::string& card) { put_number(card, 5, 1); }),
            process + " of this container is not the one that was meant");
}

// ---- ending ------------------------------------------------------------------------------------

TEST(Ending, WaitsForAWordThatIsOwed) {
  Nodes nodes(2);
  std::atomic<bool> ends{false}, said{false};
  nodes[0].owes(1) = true;
  nodes[0].set_patience(kForeverS);
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      while (!ends) std::this_thread::yield();
      for (int i = 0; i < 1000; ++i) std::this_thread::yield();
      said = true;
      return nodes[1].tell(0);
    }
    ends = true;
    nodes.end(0);
    EXPECT_TRUE(said) << "rank 1 was still reading";
  });
}

TEST(Ending, LeavesTheStageToWhoStillReadsIt) {
  Nodes nodes(2);
  constexpr size_t kNbytes = 100;
  char* stage = nodes[0].stage(kNbytes);
  std::memset(stage, 7, kNbytes);
  nodes[0].tell(1, {nodes[0].arenas()->find(stage, kNbytes), 0});
  ASSERT_TRUE(nodes[1].heard(0));
  const char* seen = nodes[1].at(0, nodes[1].note_of(0).place);
  nodes[0].owes(1) = true;
  nodes[0].set_patience(0.01);
  nodes.end(0);
  EXPECT_EQ(std::string(seen, kNbytes), std::string(kNbytes, 7));
}

TEST(Ending, WaitsForNobodyOnceAbandoned) {
  Nodes nodes(2);
  nodes[0].owes(1) = true;
  nodes[0].set_patience(kForeverS);
  nodes[0].abandon();
  run_ranks(1, [&](int) { nodes.end(0); });
}

}  // namespace
}  // namespace bagua
