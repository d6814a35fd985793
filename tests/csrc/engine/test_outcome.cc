// What ranks try together: it works on all, or all hear why not.
#include "engine/outcome.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <string>
#include <vector>

#include "engine/loopback_world.h"

namespace bagua {
namespace {

class Impatient : public Waiter {
 public:
  void begin(int) override {}
  void pause(Node*) override { std::this_thread::yield(); }
};

// Calls body(outcome, rank) on all ranks of a world.
template <class Body>
void try_together(int size, Body&& body) {
  LoopbackHub hub(size);
  run_ranks(size, [&](int rank) {
    const auto transport = hub.connect(rank);
    Impatient waiter;
    std::vector<int> all(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    Group group(*transport, waiter, all, rank);
    for (int times = 0; times < 3; ++times) {  // one after another on the same wires
      Outcome outcome(group);
      body(outcome, rank);
    }
  });
}

TEST(Outcome, AllHearThatItWorked) {
  for (const int n : {1, 2, 5})
    try_together(n, [&](Outcome& outcome, int) {
      EXPECT_FALSE(outcome.failed());
      EXPECT_EQ(outcome.settle(""), "");
      EXPECT_FALSE(outcome.failed());
    });
}

TEST(Outcome, WhoWaitsForWhoFailedHearsOfIt) {
  for (const int n : {1, 2, 5})
    for (int broken = 0; broken < n; ++broken)
      try_together(n, [&](Outcome& outcome, int rank) {
        if (rank != broken)
          while (!outcome.failed()) std::this_thread::yield();
        EXPECT_EQ(outcome.settle(rank == broken ? "no network" : "gave up"), "no network");
      });
}

TEST(Outcome, OfSeveralFailuresAllHearTheSame) {
  const int n = 4;
  for (int times = 0; times < 20; ++times) {
    std::vector<std::vector<std::string>> heard(n);
    try_together(n, [&](Outcome& outcome, int rank) {
      const std::string why_not = rank % 2 ? std::string(1000, static_cast<char>('a' + rank)) : "";
      heard[static_cast<size_t>(rank)].push_back(outcome.settle(why_not));
    });
    for (const auto& one : heard) EXPECT_EQ(one, heard[0]);
    for (const std::string& why_not : heard[0]) EXPECT_GT(why_not.size(), 100u);
  }
}

}  // namespace
}  // namespace bagua
