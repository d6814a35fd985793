// Which of the requests that some ranks have made are worth a word, by a clock of our own.
#include "engine/stalls.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace bagua {
namespace {

constexpr double kAgeS = 10;

// Ranks that tell rank 0 what they call.
class Calls {
 public:
  explicit Calls(int size) : ledger_(size), size_(size) {}
  void call(int rank, const std::string& name, int32_t set = 0, bool background = false) {
    Description d;
    d.add_tensor(DType::kF32, {1});
    d.background = background;
    tell(rank, {{name, 0}, d.encode(), ""}, set);
  }
  int32_t add_set(const std::vector<int64_t>& ranks) {
    Description d;
    d.kind = OpKind::kAddProcessSet;
    d.layout = ranks;
    ++unnamed_;
    for (int rank = 0; rank < size_; ++rank) tell(rank, {{"", unnamed_}, d.encode(), ""});
    ledger_.take();
    return ++sets_;
  }
  void pass(double s) { now_s_ += s; }
  void compute(int rank) { computes_ = rank; }
  std::vector<std::string> hopeless(double age_s = kAgeS) const {
    std::vector<std::string> labels;
    const auto waits = [this](int rank) { return rank != computes_; };
    for (const auto& stall : hopeless_stalls_in(ledger_, now_s_, age_s, waits))
      labels.push_back(stall.label);
    return labels;
  }

 private:
  void tell(int rank, const Report::Full& full, int32_t set = 0) {
    Report report;
    report.set = set;
    report.full.push_back(full);
    ledger_.report(rank, report, now_s_);
  }
  Ledger ledger_;
  const int size_;
  int computes_ = -1;  // while the others wait
  double now_s_ = 100;
  uint64_t unnamed_ = 0;
  int32_t sets_ = 0;
};
using Labels = std::vector<std::string>;

TEST(Stalls, OfRanksThatWaitForEachOther) {
  Calls calls(3);
  calls.call(0, "a");
  calls.call(1, "b");
  calls.call(2, "a");
  calls.pass(kAgeS - 1);
  EXPECT_EQ(calls.hopeless(), Labels{});
  calls.pass(1);
  EXPECT_EQ(calls.hopeless(), (Labels{"a", "b"}));
}

TEST(Stalls, OfALateRankAreNone) {
  Calls calls(3);
  calls.call(0, "a");
  calls.call(0, "b");
  calls.call(2, "a");
  calls.pass(2 * kAgeS);
  EXPECT_EQ(calls.hopeless(), Labels{});
}

// They compute meanwhile: what the others wait for may come.
TEST(Stalls, OfRanksThatGoOnAreNone) {
  Calls calls(2);
  calls.call(0, "a");
  calls.call(1, "b");
  calls.pass(kAgeS - 1);
  for (const int rank : {0, 1}) calls.call(rank, "meanwhile");
  calls.pass(kAgeS - 1);
  EXPECT_EQ(calls.hopeless(), Labels{});
  calls.call(0, "late");
  calls.pass(2);
  EXPECT_EQ(calls.hopeless(), Labels{}) << "one goes on";
  calls.pass(kAgeS);
  EXPECT_EQ(calls.hopeless(), (Labels{"a", "b", "late"}));
}

// It has called what it will wait for later.
TEST(Stalls, OfARankThatComputesAreNone) {
  Calls calls(2);
  calls.call(0, "a");
  calls.call(1, "b");
  calls.compute(1);
  calls.pass(2 * kAgeS);
  EXPECT_EQ(calls.hopeless(), Labels{});
  calls.compute(-1);
  EXPECT_EQ(calls.hopeless(), (Labels{"a", "b"}));
}

// What they have called ahead is due when one that computes has come.
TEST(Stalls, OfRanksThatWaitForALateOneAreNone) {
  Calls calls(3);
  calls.call(0, "a");
  calls.call(1, "b");
  for (const int rank : {0, 1}) calls.call(rank, "step");
  calls.compute(2);
  calls.pass(2 * kAgeS);
  EXPECT_EQ(calls.hopeless(), Labels{});
}

// The one at the end of a row may come, and then the next.
TEST(Stalls, OfRanksInARowAreNone) {
  constexpr int kRanks = 5;
  Calls calls(kRanks);
  std::vector<int32_t> pairs;
  for (int rank = 0; rank + 1 < kRanks; ++rank) pairs.push_back(calls.add_set({rank, rank + 1}));
  for (int rank = 0; rank + 1 < kRanks; ++rank) calls.call(rank, "next", pairs[rank]);
  calls.pass(2 * kAgeS);
  EXPECT_EQ(calls.hopeless(), Labels{});
  calls.call(kRanks - 1, "first", calls.add_set({0, kRanks - 1}));
  calls.pass(kAgeS);
  EXPECT_EQ(calls.hopeless().size(), size_t{kRanks});
}

TEST(Stalls, OfRanksInACircle) {
  Calls calls(4);
  const int32_t sets[] = {calls.add_set({0, 1}), calls.add_set({1, 2}), calls.add_set({0, 2})};
  calls.call(0, "a", sets[0]);
  calls.call(1, "b", sets[1]);
  calls.call(3, "late");
  calls.pass(kAgeS);
  EXPECT_EQ(calls.hopeless(), Labels{});
  calls.call(2, "c", sets[2]);
  calls.pass(kAgeS);
  EXPECT_EQ(calls.hopeless(),
            (Labels{"late", "a (process set 1)", "b (process set 2)", "c (process set 3)"}))
      << "and who waits for those";
}

TEST(Stalls, OfSeveralProcessSets) {
  Calls calls(3);
  const int32_t first = calls.add_set({0, 1}), second = calls.add_set({1, 2});
  calls.call(0, "a", first);
  calls.call(1, "b", second);
  calls.pass(kAgeS);
  EXPECT_EQ(calls.hopeless(), Labels{}) << "rank 2 may come, and then rank 1";
  calls.call(2, "c");
  calls.pass(kAgeS);
  EXPECT_EQ(calls.hopeless(), (Labels{"c", "a (process set 1)", "b (process set 2)"}))
      << "rank 2 waits for both";
}

TEST(Stalls, InTheBackgroundAreNone) {
  Calls calls(2);
  calls.call(0, "a", 0, /*background=*/true);
  calls.call(1, "b");
  calls.pass(kAgeS);
  EXPECT_EQ(calls.hopeless(), Labels{});
  calls.call(0, "c");
  calls.pass(kAgeS);
  EXPECT_EQ(calls.hopeless(), Labels{}) << "perhaps it waits for that";
}

// Rank 0 answers others meanwhile: it must not take long.
TEST(Stalls, OfManyTensorsOfManyRanks) {
  constexpr int kRanks = 512, kTensors = 200;
  Calls calls(kRanks);
  for (int i = 0; i < kTensors; ++i)
    for (int rank = 0; rank < kRanks / 2; ++rank) calls.call(rank, std::to_string(i));
  calls.pass(kAgeS);
  EXPECT_EQ(calls.hopeless(), Labels{});
  calls.call(kRanks - 1, "other");
  calls.pass(kAgeS);
  EXPECT_EQ(calls.hopeless().size(), kTensors + 1u);
}

}  // namespace
}  // namespace bagua
