// Rank 0's book by itself: reports in, decisions out.
#include "engine/ledger.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace bagua {
namespace {

Description sum_of(int64_t count) {
  Description d;
  d.add_tensor(DType::kF32, {count});
  return d;
}

Report::Full full(const std::string& name, const Description& d, uint64_t seq = 0) {
  return {{name, seq}, d.encode(), ""};
}
Report::Full refusal(const std::string& name, const std::string& why) {
  return {{name, 0}, "", why};
}

// A ledger with a shorter way to tell it things, at a clock that the test sets.
class Book {
 public:
  explicit Book(int size) : ledger(size) {}
  void tell(int rank, const Report::Full& f, int32_t set = 0) {
    Report r;
    r.set = set;
    r.full.push_back(f);
    ledger.report(rank, r, now_s);
  }
  void bit(int rank, int32_t id, int32_t set = 0) {
    Report r;
    r.set = set;
    r.ids.push_back(id);
    ledger.report(rank, r, now_s);
  }
  void again(int rank, uint64_t seq, int32_t id) {
    Report r;
    r.unnamed.push_back({seq, id});
    ledger.report(rank, r, now_s);
  }
  void join(int rank, int32_t set = 0) {
    Report r;
    r.set = set;
    r.join = true;
    ledger.report(rank, r, now_s);
  }
  // Who waits for what has one of these names, or for anything, does so no longer.
  void give_up(double after_s, const std::string& name = "") {
    now_s += after_s;
    for (const auto& stall : ledger.stalls(now_s, after_s))
      if (name.empty() || stall.key.name == name) ledger.give_up(stall, "late", now_s);
  }
  // Everything decided since, as one decision.
  Decision take() {
    Decision all;
    for (Decision& d : ledger.take()) {
      const auto move = [](auto& from, auto& to) { to.insert(to.end(), from.begin(), from.end()); };
      move(d.definitions, all.definitions);
      move(d.agreed, all.agreed);
      move(d.rejections, all.rejections);
      if (d.last_joined >= 0) all.last_joined = d.last_joined;
    }
    return all;
  }
  void nothing() { EXPECT_TRUE(ledger.take().empty()); }
  int32_t know(const std::string& name, const Description& d) {
    for (const int rank : ledger.ranks_of(0)) tell(rank, full(name, d));
    return take().agreed.at(0).id;
  }
  void remove_set(int32_t set) {
    Description d;
    d.kind = OpKind::kRemoveProcessSet;
    d.root = set;
    ++seq;
    for (const int rank : ledger.ranks_of(0)) tell(rank, full("", d, seq));
  }
  int32_t add_set(const std::vector<int64_t>& ranks) {
    Description d;
    d.kind = OpKind::kAddProcessSet;
    d.layout = ranks;
    ++seq;
    for (const int rank : ledger.ranks_of(0)) tell(rank, full("", d, seq));
    EXPECT_EQ(take().agreed.size(), 1u);
    return ++sets;
  }

  Ledger ledger;
  double now_s = 100;
  uint64_t seq = 1000;
  int32_t sets = 0;
};

std::string only_rejection(Book& book) {
  const Decision d = book.take();
  EXPECT_TRUE(d.agreed.empty());
  EXPECT_EQ(d.rejections.size(), 1u);
  return d.rejections.empty() ? "" : d.rejections[0].text;
}
#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << text

TEST(Ledger, AgreesWhenTheLastMemberHasReported) {
  Book book(3);
  book.tell(2, full("x", sum_of(4)));
  book.tell(0, full("x", sum_of(4)));
  book.nothing();
  EXPECT_TRUE(book.ledger.any_open());
  book.tell(1, full("x", sum_of(4)));
  const Decision d = book.take();
  ASSERT_EQ(d.definitions.size(), 1u);
  EXPECT_EQ(d.definitions[0].name, "x");
  ASSERT_EQ(d.agreed.size(), 1u);
  EXPECT_EQ(d.agreed[0].id, d.definitions[0].id);
  EXPECT_FALSE(book.ledger.any_open());
}

TEST(Ledger, KnownRequestsNeedOnlyBits) {
  Book book(2);
  const int32_t x = book.know("x", sum_of(1)), y = book.know("y", sum_of(2));
  book.bit(0, y);
  book.bit(0, x);
  book.bit(1, x);
  Decision d = book.take();
  EXPECT_TRUE(d.definitions.empty());
  ASSERT_EQ(d.agreed.size(), 1u);
  EXPECT_EQ(d.agreed[0].id, x);
  book.bit(1, y);
  EXPECT_EQ(book.take().agreed.at(0).id, y);
}

TEST(Ledger, UnnamedRequestsMatchByPosition) {
  Book book(2);
  book.tell(0, full("", sum_of(1), 1));
  book.tell(0, full("", sum_of(2), 2));
  book.tell(1, full("", sum_of(1), 1));
  Decision d = book.take();
  ASSERT_EQ(d.agreed.size(), 1u);
  EXPECT_EQ(d.agreed[0].seq, 1u);
  const int32_t id = d.agreed[0].id;
  book.tell(1, full("", sum_of(1), 2));
  EXPECT_HAS(only_rejection(book), "shape: [2] on rank 0, [1] on rank 1");
  book.again(0, 3, id);
  book.again(1, 3, id);
  EXPECT_EQ(book.take().agreed.at(0).id, id);
}

TEST(Ledger, ChangedDescriptionMeetsBitsOfTheOldOne) {
  for (const bool bit_first : {true, false}) {
    Book book(2);
    const int32_t x = book.know("x", sum_of(1));
    if (bit_first) book.bit(0, x);
    book.tell(1, full("x", sum_of(2)));
    if (!bit_first) book.bit(0, x);
    EXPECT_HAS(only_rejection(book), "disagree on shape");
    // The old agreement still stands.
    book.bit(0, x);
    book.bit(1, x);
    EXPECT_EQ(book.take().agreed.at(0).id, x);
  }
}

TEST(Ledger, AllMembersMayChangeADescription) {
  Book book(2);
  const int32_t x = book.know("x", sum_of(1));
  book.tell(0, full("x", sum_of(2)));
  book.tell(1, full("x", sum_of(2)));
  const Decision d = book.take();
  ASSERT_EQ(d.definitions.size(), 1u);
  EXPECT_EQ(d.definitions[0].id, x);
  EXPECT_EQ(d.agreed.at(0).id, x);
}

TEST(Ledger, MismatchNamesRanksAndValues) {
  Book book(4);
  for (const int rank : {0, 1, 3}) book.tell(rank, full("x", sum_of(4)));
  Description other = sum_of(4);
  other.op = ReduceOp::kMax;
  book.tell(2, full("x", other));
  const std::string text = only_rejection(book);
  EXPECT_HAS(text, "x: ");
  EXPECT_HAS(text, "reduce op: sum on ranks 0, 1, 3, max on rank 2");
}

TEST(Ledger, RefusalWaitsForTheOthersThenFailsAll) {
  Book book(2);
  book.tell(0, refusal("x", "no such root"));
  book.nothing();
  book.tell(1, full("x", sum_of(1)));
  EXPECT_HAS(only_rejection(book), "rank 0: no such root");
  EXPECT_FALSE(book.ledger.any_open());
}

TEST(Ledger, AWithdrawalEndsWhatBeginsSoNowAndLater) {
  Book book(3);
  const int32_t known = book.know("a.known", sum_of(1));
  const int32_t other = book.know("ab", sum_of(1));
  book.bit(0, known);
  book.bit(2, known);
  book.tell(2, full("a.new", sum_of(1)));
  book.bit(2, other);
  book.tell(1, {{"a.", 0}, "", "was interrupted", true});
  const auto now = book.take();
  ASSERT_EQ(now.rejections.size(), 2u);
  for (const auto& rejection : now.rejections) {
    const bool is_new = rejection.key.name == "a.new";
    EXPECT_EQ(rejection.text, rejection.key.name + ": rank 1 was interrupted");
    EXPECT_EQ(rejection.kind, ErrorKind::kPeer);
    EXPECT_EQ(rejection.ranks, is_new ? std::vector<int>{2} : (std::vector<int>{0, 2}));
  }
  for (const int rank : {0, 1, 2}) {
    book.bit(rank, known);
    EXPECT_EQ(book.take().rejections.at(0).ranks, std::vector<int>{rank});
    book.tell(rank, full("a.later", sum_of(1)));
    EXPECT_EQ(book.take().rejections.at(0).ranks, std::vector<int>{rank});
  }
  book.bit(0, other);
  book.bit(1, other);
  EXPECT_EQ(book.take().agreed.size(), 1u);
  EXPECT_FALSE(book.ledger.any_open());
}

// A rank that was not asked, or whose first try was refused at once, may have another of that name.
TEST(Ledger, RejectionsMeanOnlyThoseWhoseRequestTheyEnd) {
  Book book(3);
  const int32_t known = book.know("known", sum_of(1));
  book.tell(0, refusal("x", "bad"));
  book.tell(1, full("x", sum_of(1)));
  book.tell(2, full("x", sum_of(1)));
  EXPECT_EQ(book.take().rejections.at(0).ranks, (std::vector<int32_t>{1, 2}));
  book.tell(2, full("y", sum_of(1)));
  book.bit(0, known);
  for (const auto& stall : book.ledger.stalls(book.now_s + 10, 5))
    book.ledger.give_up(stall, "late", book.now_s);
  for (const auto& rejection : book.take().rejections)
    EXPECT_EQ(rejection.ranks, (std::vector<int32_t>{rejection.key.name == "y" ? 2 : 0}));
}

TEST(Ledger, SecondTryAfterARefusalWaitsForTheOthersSecond) {
  Book book(2);
  book.tell(0, refusal("x", "bad"));
  book.tell(0, full("x", sum_of(1)));
  book.tell(1, full("x", sum_of(1)));
  EXPECT_HAS(only_rejection(book), "bad");
  book.tell(1, full("x", sum_of(1)));
  EXPECT_EQ(book.take().agreed.size(), 1u);
}

TEST(Ledger, SecondTryAfterARefusalHearsWhenTheFirstIsGivenUp) {
  for (const bool removed : {false, true}) {
    Book book(3);
    const int32_t set = book.add_set({0, 1});
    book.tell(0, refusal("x", "bad"), set);
    book.tell(0, full("x", sum_of(1)), set);
    if (removed) {
      book.remove_set(set);
    } else {
      for (const auto& stall : book.ledger.stalls(book.now_s + 10, 5))
        book.ledger.give_up(stall, "late", book.now_s);
    }
    const Decision d = book.take();
    ASSERT_EQ(d.rejections.size(), 1u);
    EXPECT_EQ(d.rejections[0].key.name, "x");
    EXPECT_EQ(d.rejections[0].ranks, (std::vector<int32_t>{0}));
    EXPECT_FALSE(book.ledger.any_open());
  }
}

TEST(Ledger, RefusalOfAKnownNameMeetsBits) {
  Book book(3);
  const int32_t x = book.know("x", sum_of(1));
  book.bit(0, x);
  book.tell(1, refusal("x", "bad"));
  book.bit(1, x);
  book.bit(2, x);
  EXPECT_HAS(only_rejection(book), "rank 1: bad");
  book.bit(0, x);
  book.bit(2, x);
  EXPECT_EQ(book.take().agreed.size(), 1u);
}

TEST(Ledger, MemberThatLeftFailsWhatNeedsIt) {
  Book book(3);
  const int32_t x = book.know("x", sum_of(1));
  book.bit(0, x);
  book.tell(0, full("y", sum_of(1)));
  book.ledger.leave(1);
  Decision d = book.take();
  ASSERT_EQ(d.rejections.size(), 2u);
  for (const auto& rejection : d.rejections) {
    EXPECT_EQ(rejection.kind, ErrorKind::kLeft);
    EXPECT_HAS(rejection.text, "rank 1");
    EXPECT_HAS(rejection.text, "shut down");
  }
  book.bit(2, x);  // and later
  EXPECT_HAS(only_rejection(book), "shut down");
}

TEST(Ledger, MemberThatLeftAfterReportingIsNotMissed) {
  Book book(2);
  const int32_t x = book.know("x", sum_of(1));
  book.bit(1, x);
  book.ledger.leave(1);
  book.take();
  book.bit(0, x);
  // Agreed or rejected, but decided: rank 0 must not wait.
  const Decision d = book.take();
  EXPECT_EQ(d.agreed.size() + d.rejections.size(), 1u);
}

TEST(Ledger, JoinedMembersAreNotWaitedFor) {
  Book book(3);
  const int32_t x = book.know("x", sum_of(1));
  book.bit(0, x);
  book.join(2);
  book.nothing();
  book.bit(1, x);
  EXPECT_EQ(book.take().agreed.size(), 1u);
  book.join(0);
  EXPECT_EQ(book.take().last_joined, -1);
  book.join(1);
  EXPECT_EQ(book.take().last_joined, 1);
  book.bit(0, x);  // all are back
  book.bit(1, x);
  book.nothing();
}

TEST(Ledger, JoinSettlesWhatIsAlreadyOpen) {
  Book book(2);
  const int32_t x = book.know("x", sum_of(1));
  book.bit(0, x);
  book.tell(0, full("y", sum_of(1)));
  book.join(1);
  EXPECT_EQ(book.take().agreed.size(), 2u);
}

TEST(Ledger, JoinCompletesWhenTheRestLeaves) {
  Book book(3);
  book.join(0);
  book.join(1);
  book.nothing();
  book.ledger.leave(2);
  EXPECT_EQ(book.take().last_joined, 1);
}

TEST(Ledger, JoinNeedsEveryMemberThatIsThere) {
  Book book(3);
  book.join(1);
  book.ledger.leave(1);
  book.join(0);
  EXPECT_EQ(book.take().last_joined, -1) << "rank 2 has not joined";
  book.join(2);
  EXPECT_EQ(book.take().last_joined, 2);
}

TEST(Ledger, JoinRefusesAlltoallAndItsRoot) {
  Book book(2);
  book.join(1);
  Description swap = sum_of(1);
  swap.kind = OpKind::kAlltoall;
  book.tell(0, full("a", swap));
  const Decision refused = book.take();
  ASSERT_EQ(refused.rejections.size(), 1u);
  EXPECT_EQ(refused.rejections[0].kind, ErrorKind::kJoined);
  EXPECT_EQ(refused.rejections[0].text, "a: rank 1 has joined and takes no part in this alltoall");
  Description spread = sum_of(1);
  spread.kind = OpKind::kBroadcast;
  spread.root = 1;
  book.tell(0, full("b", spread));
  EXPECT_HAS(only_rejection(book), "its root, rank 1, has joined");
  spread.root = 0;
  book.tell(0, full("b", spread));
  EXPECT_EQ(book.take().agreed.size(), 1u);
}

TEST(Ledger, JoinRefusesWhatNeighborsKeepCopiesOf) {
  Book book(2);
  Description ring = sum_of(1);
  ring.codec = "minmax_u8";
  ring.peers = "ring";
  const int32_t id = book.know("a", ring);
  book.join(1);
  const std::string text =
      "a: rank 1 has joined, and its neighbors keep copies of its values: take as many steps on "
      "every rank, or send weights as they are";
  book.bit(0, id);
  EXPECT_EQ(only_rejection(book), text) << "known by its number";
  book.tell(0, full("a", ring));
  EXPECT_EQ(only_rejection(book), text) << "in full";
}

TEST(Ledger, ProcessSetsHaveTheirOwnBook) {
  Book book(3);
  const int32_t set = book.add_set({0, 2});
  EXPECT_EQ(book.ledger.ranks_of(set), (std::vector<int>{0, 2}));
  book.tell(0, full("x", sum_of(1)), set);
  book.tell(1, full("x", sum_of(1)), set);  // not a member: ignored
  book.tell(1, full("x", sum_of(1)));       // the world's x is another
  book.nothing();
  book.tell(2, full("x", sum_of(1)), set);
  const std::vector<Decision> decisions = book.ledger.take();
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].set, set);
  EXPECT_EQ(decisions[0].agreed.size(), 1u);
}

TEST(Ledger, RemovedProcessSetDecidesEverythingReported) {
  Book book(3);
  const int32_t set = book.add_set({0, 2});
  for (const int rank : {0, 2}) book.tell(rank, full("known", sum_of(1)), set);
  const int32_t known = book.take().agreed.at(0).id;
  book.tell(0, full("open", sum_of(1)), set);
  book.remove_set(set);
  Decision d = book.take();
  ASSERT_EQ(d.rejections.size(), 1u);
  EXPECT_EQ(d.rejections[0].key.name, "open");
  book.tell(2, full("late", sum_of(1)), set);
  EXPECT_EQ(book.take().rejections.size(), 1u);
  book.bit(2, known, set);
  EXPECT_EQ(book.take().rejections.size(), 1u) << "a bit is a request too";
  book.join(2, set);
  d = book.take();
  ASSERT_EQ(d.rejections.size(), 1u) << "and a join";
  EXPECT_TRUE(d.rejections[0].key.is_join());
  EXPECT_EQ(d.rejections[0].ranks, std::vector<int32_t>{2});
}

// Once each member has said its last word of it, whoever has shut down included.
TEST(Ledger, RemovedProcessSetIsForgotten) {
  Book book(3);
  const auto last = [&](int rank, int32_t set) {
    Report r;
    r.set = set;
    r.last = true;
    book.ledger.report(rank, r, 0);
  };
  const int32_t set = book.add_set({0, 2});
  book.remove_set(set);
  book.take();
  last(0, set);
  book.nothing();
  EXPECT_EQ(book.ledger.set_count(), 2u) << "rank 2 may still ask for something";
  book.tell(2, full("late", sum_of(1)), set);
  last(2, set);
  EXPECT_EQ(book.take().rejections.size(), 1u);
  book.nothing();
  EXPECT_EQ(book.ledger.set_count(), 1u);
  const int32_t other = book.add_set({0, 2});
  book.remove_set(other);
  book.take();
  last(0, other);
  book.ledger.leave(2);
  book.nothing();
  EXPECT_EQ(book.ledger.set_count(), 1u);
}

// Who has joined it has stood in until then, and goes on.
TEST(Ledger, RemovedProcessSetEndsJoins) {
  Book book(4);
  const int32_t set = book.add_set({0, 1, 2});
  Description patient = sum_of(1);
  patient.background = true;
  for (const int rank : {0, 2}) book.join(rank, set);
  book.tell(1, full("held back", patient), set);
  book.remove_set(set);
  const auto taken = book.ledger.take();
  ASSERT_EQ(taken.size(), 4u);
  EXPECT_EQ(taken[2].agreed.size(), 1u) << "what was held back";
  ASSERT_EQ(taken[3].rejections.size(), 1u);
  EXPECT_EQ(taken[3].set, set);
  EXPECT_TRUE(taken[3].rejections[0].key.is_join());
  EXPECT_HAS(taken[3].rejections[0].text, "was removed");
  EXPECT_EQ(taken[3].rejections[0].ranks, (std::vector<int32_t>{0, 2}));
  EXPECT_FALSE(book.ledger.any_open());
}

TEST(Ledger, StallsNameWhoIsMissing) {
  Book book(4);
  const int32_t x = book.know("x", sum_of(1));
  book.bit(1, x);
  book.now_s = 105;
  book.tell(0, full("", sum_of(1), 1));
  EXPECT_TRUE(book.ledger.stalls(106, 10).empty());
  auto stalls = book.ledger.stalls(111, 10);
  ASSERT_EQ(stalls.size(), 1u);
  EXPECT_EQ(stalls[0].label, "x");
  EXPECT_EQ(stalls[0].missing, (std::vector<int>{0, 2, 3}));
  stalls = book.ledger.stalls(116, 10);
  ASSERT_EQ(stalls.size(), 2u);
  EXPECT_EQ(stalls[1].label, "allreduce #1");
  EXPECT_EQ(stalls[1].missing, (std::vector<int>{1, 2, 3}));
  book.now_s = 116;
  for (const auto& stall : stalls) book.ledger.give_up(stall, stall.label + " is late", book.now_s);
  EXPECT_EQ(book.take().rejections.size(), 2u);
  EXPECT_FALSE(book.ledger.any_open());
}

// What a late rank brings is of the time before; the others have begun anew.
TEST(Ledger, WhoComesToWhatOthersGaveUpHearsSo) {
  Book book(3);
  const int32_t known = book.know("known", sum_of(1));
  book.bit(0, known);
  book.bit(1, known);
  book.tell(0, full("new", sum_of(1)));
  book.tell(0, full("", sum_of(1), 7));
  book.give_up(10);
  EXPECT_EQ(book.take().rejections.size(), 3u);
  book.bit(0, known);  // tries again
  book.bit(2, known);
  book.tell(1, refusal("new", "bad"));  // has an error of its own, and is told nothing more
  book.tell(2, full("", sum_of(1), 7));
  std::map<std::string, std::string> told;
  for (const auto& rejection : book.take().rejections) {
    EXPECT_EQ(rejection.ranks, std::vector<int32_t>{2});
    told[rejection.key.name] = rejection.text;
  }
  EXPECT_EQ(told.size(), 2u);
  EXPECT_HAS(told["known"], "known: ranks 0, 1 gave up waiting for this rank");
  EXPECT_HAS(told[""], "allreduce #7: rank 0 gave up waiting for this rank");
  // It has heard so once. What it brings next is met.
  book.bit(1, known);
  book.bit(2, known);
  EXPECT_EQ(book.take().agreed.size(), 1u);
  EXPECT_FALSE(book.ledger.any_open());
}

// Then nothing is wrong with the call: some have to begin anew.
TEST(Ledger, WhoIsInAnotherStepIsApart) {
  for (int32_t Description::* count : {&Description::earlier, &Description::failures}) {
    Book book(2);
    Description ahead = sum_of(1);
    ahead.*count = 1;
    book.tell(0, full("x", sum_of(1)));
    book.tell(1, full("x", ahead));
    const Decision d = book.take();
    ASSERT_EQ(d.rejections.size(), 1u);
    EXPECT_EQ(d.rejections[0].kind, ErrorKind::kPeer);
    EXPECT_HAS(d.rejections[0].text, "0 on rank 0, 1 on rank 1");
  }
}

// A rank that had skipped a call, and met the others since, is not late for the next of its name.
TEST(Ledger, WhoHasMetTheOthersSinceIsNotLate) {
  Description quiet = sum_of(1);
  quiet.background = true;
  Book book(2);
  for (const bool joins : {false, true}) {
    book.tell(0, full("skipped", sum_of(1)));
    book.tell(1, full("before", sum_of(1)));
    book.give_up(10, "skipped");
    EXPECT_HAS(only_rejection(book), "late");
    // What began before, or gives way, says nothing of it.
    book.tell(0, full("before", sum_of(1)));
    for (const int rank : {0, 1}) book.tell(rank, full("quiet", quiet));
    for (const Decision& d : book.ledger.take(true)) EXPECT_TRUE(d.rejections.empty());
    if (joins) {
      book.join(1);
      book.join(0);
    } else {
      for (const int rank : {0, 1}) book.tell(rank, full("since", sum_of(1)));
    }
    book.take();
    for (const int rank : {0, 1}) book.tell(rank, full("skipped", sum_of(1)));
    EXPECT_EQ(book.take().agreed.size(), 1u);
  }
}

// Whoever does not wait for it needs no warning, nor is it given up.
TEST(Ledger, AStallInTheBackgroundIsToldFromOthers) {
  Description quiet = sum_of(1);
  quiet.background = true;
  Book book(2);
  for (const int rank : {0, 1}) book.tell(rank, full("known", quiet));
  EXPECT_TRUE(book.take().agreed.empty());
  ASSERT_TRUE(book.ledger.has_background());
  book.bit(0, book.ledger.take_background().agreed.at(0).id);
  book.tell(0, full("new", quiet));
  book.tell(0, full("awaited", sum_of(1)));
  std::map<std::string, bool> background;
  for (const auto& stall : book.ledger.stalls(book.now_s + 10, 5))
    background[stall.label] = stall.background;
  EXPECT_EQ(background,
            (std::map<std::string, bool>{{"awaited", false}, {"known", true}, {"new", true}}));
}

// Whoever was refused has its error, and may never come again.
TEST(Ledger, NobodyWaitsWhereAllWereRefused) {
  Book book(3);
  book.tell(0, refusal("x", "bad"));
  EXPECT_TRUE(book.ledger.stalls(110, 5).empty());
  EXPECT_FALSE(book.ledger.any_open());
  book.now_s = 120;
  book.tell(0, refusal("x", "worse"));
  EXPECT_TRUE(book.ledger.stalls(130, 5).empty());
  book.now_s = 140;
  book.tell(0, full("x", sum_of(1)));
  EXPECT_TRUE(book.ledger.any_open());
  EXPECT_TRUE(book.ledger.stalls(144, 5).empty());
  const auto stalls = book.ledger.stalls(145, 5);
  ASSERT_EQ(stalls.size(), 1u);
  EXPECT_EQ(stalls[0].since_s, 140);
  EXPECT_EQ(stalls[0].waiting, std::vector<int>{0});
  EXPECT_EQ(stalls[0].missing, (std::vector<int>{1, 2}));
}

TEST(Ledger, JoinsStallWhenTheOthersSayNothing) {
  Book book(4);
  book.ledger.leave(2);
  book.join(1);
  EXPECT_TRUE(book.ledger.any_open());
  book.now_s = 108;
  book.tell(3, full("x", sum_of(1)));  // which fails, but is work
  book.take();
  EXPECT_TRUE(book.ledger.stalls(112, 10).empty());
  const auto stalls = book.ledger.stalls(118, 10);
  ASSERT_EQ(stalls.size(), 1u);
  EXPECT_EQ(stalls[0].label, "join");
  EXPECT_EQ(stalls[0].missing, (std::vector<int>{0, 3}));
  EXPECT_EQ(stalls[0].waiting, std::vector<int>{1});
  EXPECT_EQ(stalls[0].since_s, 108);
  book.ledger.give_up(stalls[0], "join: late", book.now_s);
  const Decision d = book.take();
  ASSERT_EQ(d.rejections.size(), 1u);
  EXPECT_TRUE(d.rejections[0].key.is_join());
  EXPECT_EQ(d.rejections[0].ranks, std::vector<int32_t>{1});
  EXPECT_FALSE(book.ledger.any_open());
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(book.take().last_joined, -1);
    book.join(rank);
  }
  EXPECT_EQ(book.take().last_joined, 3);
}

TEST(Ledger, RemembersOnlySoManyUnnamed) {
  Book book(1);
  constexpr uint64_t kMany = 5000;
  int forgotten = 0;
  for (uint64_t i = 1; i <= kMany; ++i) {
    book.tell(0, full("", sum_of(static_cast<int64_t>(i)), i));
    const Decision d = book.take();
    ASSERT_EQ(d.agreed.size(), 1u);
    ASSERT_EQ(d.definitions.size(), 1u);
    forgotten += d.agreed[0].id == Decision::kForgotten;
  }
  EXPECT_EQ(forgotten, static_cast<int>(kMany) - (1 << 12));
}

// Rounds of peers are counted, and background work is held back, by the number of an entry.
TEST(Ledger, RemembersWhatHasPeersAndWhatGivesWay) {
  Book book(1);
  Description paired = sum_of(1), patient = sum_of(2);
  paired.peers = "shift_one:0:0";
  patient.background = true;
  for (uint64_t i = 1; i <= 5000; ++i) {
    book.tell(0, full("", sum_of(static_cast<int64_t>(10 + i)), i));
    book.take();
  }
  book.tell(0, full("", paired, 5001));
  EXPECT_NE(book.take().agreed.at(0).id, Decision::kForgotten);
  book.tell(0, full("", patient, 5002));
  EXPECT_TRUE(book.take().agreed.empty());
  ASSERT_TRUE(book.ledger.has_background());
  EXPECT_NE(book.ledger.take_background().agreed.at(0).id, Decision::kForgotten);
}

TEST(Ledger, HoldsBackWhatRunsInTheBackground) {
  Book book(2);
  Description patient = sum_of(1);
  patient.background = true;
  for (const char* name : {"late", "later"})
    for (int rank : {0, 1}) book.tell(rank, full(name, patient));
  for (int rank : {0, 1}) book.tell(rank, full("now", sum_of(1)));
  const Decision first = book.take();
  EXPECT_EQ(first.definitions.size(), 3u);
  ASSERT_EQ(first.agreed.size(), 1u);
  EXPECT_EQ(first.agreed[0].id, 2);
  book.nothing();
  ASSERT_TRUE(book.ledger.has_background());
  EXPECT_EQ(book.ledger.take_background().agreed[0].id, 0);
  EXPECT_EQ(book.ledger.take_background().agreed[0].id, 1);
  EXPECT_FALSE(book.ledger.has_background());
}

TEST(Ledger, WhoHasJoinedStandsInForTheBackgroundBeforeItGoesOn) {
  Book book(2);
  Description patient = sum_of(1);
  patient.background = true;
  book.join(1);
  book.tell(0, full("late", patient));
  book.take();
  book.join(0);
  const auto taken = book.ledger.take();
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].agreed.size(), 1u);
  EXPECT_EQ(taken[1].last_joined, 0);
}

}  // namespace
}  // namespace bagua
