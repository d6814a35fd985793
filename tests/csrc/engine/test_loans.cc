#include "engine/loans.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "common/errors.h"
#include "device/pretend.h"

namespace bagua {
namespace {

// A device that is far behind until `go`, and exchanges that borrow of it.
struct Lender {
  void hold() {
    go = false;
    device.run(stream, [this] {
      while (!go) std::this_thread::yield();
    });
  }
  // An exchange that takes memory of these sizes, and what it got.
  std::vector<char*> exchange(const std::vector<size_t>& sizes) { return exchange(sizes, stream); }
  std::vector<char*> exchange(const std::vector<size_t>& sizes, Device::Stream on) {
    std::vector<char*> got;
    for (const size_t nbytes : sizes) got.push_back(loans.borrow(nbytes, on));
    loans.end(device.mark(on), on);
    return got;
  }

  PretendDevice device{0};
  const Device::Stream stream = device.add_stream(), other = device.add_stream();
  std::atomic<bool> go{false};
  std::function<void()> before_waiting = [] {};  // if there is something to wait for
  Loans loans{&device, stream, [this](const std::function<bool()>& reached) {
                if (!reached()) before_waiting();
                while (!reached()) std::this_thread::yield();
              }};
};

TEST(Loans, AreTheNextOnesThoughTheDeviceIsBehind) {
  Lender lender;
  lender.hold();
  const auto first = lender.exchange({1000, 5000});
  EXPECT_EQ(lender.exchange({5000, 1000}), (std::vector<char*>{first[1], first[0]}));
  EXPECT_EQ(lender.exchange({800}), std::vector<char*>{first[0]});
  EXPECT_EQ(lender.device.allocations(), 2);
  lender.go = true;
}

TEST(Loans, AreNotTwoPiecesAtOnce) {
  Lender lender;
  lender.exchange({1000});
  const auto two = lender.exchange({1000, 1000});
  EXPECT_NE(two[0], two[1]);
}

// What is much larger than that stays for those who need it.
TEST(Loans, AreNotMuchMoreThanIsAskedFor) {
  Lender lender;
  const auto large = lender.exchange({100'000});
  EXPECT_NE(lender.exchange({1000}), large);
  EXPECT_EQ(lender.exchange({60'000}), large);
}

// Others may overtake what is under way there: they share with nobody until it is done.
TEST(Loans, OfAnotherStreamAreItsOwn) {
  Lender lender;
  lender.hold();
  const auto first = lender.exchange({1000});
  for (char* data : lender.exchange({1000, 3000}, lender.other)) EXPECT_NE(data, first[0]);
  EXPECT_EQ(lender.exchange({1000}), first);
  lender.go = true;
}

// However sizes grow, what is too small goes back to the device: not before it is done with.
TEST(Loans, ThatAreTooSmallGoBack) {
  Lender lender;
  lender.hold();
  const auto small = lender.exchange({1000});
  lender.exchange({3000});
  const auto others = lender.device.lend(1000);
  EXPECT_NE(others.get(), small[0]);
  lender.go = true;
  lender.device.drain(lender.stream);
  lender.device.let_go();
  EXPECT_EQ(lender.device.lend(1000).get(), small[0]);
  EXPECT_NE(lender.exchange({1000})[0], nullptr);
}

// What is too small is a part of the room that there is.
TEST(Loans, GrowIntoTheRoomOfWhatIsTooSmall) {
  Lender lender;
  lender.device.has(3500);
  lender.exchange({1000});
  lender.hold();
  lender.before_waiting = [&] { lender.go = true; };
  lender.exchange({1000});
  EXPECT_NO_THROW(lender.exchange({3000}));
}

// What was much more than is needed now goes, when what is under way is done with it.
TEST(Loans, MakeRoom) {
  Lender lender;
  lender.exchange({100'000});
  lender.hold();
  lender.exchange({100'000});
  lender.device.has(700);
  bool waited = false;
  lender.before_waiting = [&] {
    waited = true;
    lender.go = true;
  };
  EXPECT_NE(lender.exchange({2000})[0], nullptr);
  EXPECT_TRUE(waited);
}

// Who waits for room in vain has lost nothing.
TEST(Loans, StayWhereWaitingIsPointless) {
  Lender lender;
  lender.hold();
  const auto large = lender.exchange({100'000});
  lender.device.has(700);
  lender.before_waiting = [] { throw PeerError("rank 1 is gone"); };
  EXPECT_THROW(lender.exchange({2000}), PeerError);
  EXPECT_EQ(lender.exchange({100'000}), large);
  lender.go = true;
}

TEST(Loans, AreAnErrorWhereNothingMakesRoom) {
  Lender lender;
  lender.device.has(700);
  EXPECT_THROW(lender.exchange({2000}), UsageError);
}

// To let go of memory would wait for what the exchange at hand has given, too, whoever has it.
TEST(Loans, MakeNoRoomBeforeAllIsDone) {
  Lender lender;
  lender.device.lend(100'000);
  lender.device.has(700);
  EXPECT_NE(lender.loans.borrow(500, lender.stream), nullptr);
  lender.hold();
  lender.before_waiting = [] { throw PeerError("rank 1 is gone"); };
  EXPECT_THROW(lender.loans.borrow(2000, lender.stream), PeerError);
  EXPECT_THROW(lender.loans.lend(2000, lender.stream), PeerError);
  lender.before_waiting = [&] { lender.go = true; };
  EXPECT_NE(lender.loans.lend(2000, lender.stream), nullptr);
}

}  // namespace
}  // namespace bagua
