// Who may drive, what is taken, and who is woken: without agreement or exchange behind it.
#include "engine/door.h"

#include <gtest/gtest.h>

#include "engine/loopback_world.h"

namespace bagua {
namespace {

// Counts what would wake somebody up.
struct Bell : Channel {
  void send(int, std::string_view) override {}
  void receive(int, std::vector<Message>&) override {}
  void wake() override { ++rung; }
  void wake_after(int) override { ++later; }
  void doze(int) override {}
  void hush(bool hushed) override { silent = hushed; }
  std::atomic<int> rung{0}, later{0};
  std::atomic<bool> silent{false};
};

class DoorTest : public testing::Test {
 protected:
  RequestPtr barrier(const std::string& name, Urgency urgency = Urgency::kWaited) {
    RequestPtr request = request_of(OpKind::kBarrier, name);
    door.submit(request, urgency);
    return request;
  }
  std::vector<RequestPtr> taken(int64_t least_nbytes = 0) {
    std::vector<RequestPtr> all;
    const bool some = door.take(all, least_nbytes);
    EXPECT_EQ(some, !all.empty());
    return all;
  }
  Door::Wait wait(const RequestPtr& request, double timeout_s = kHangS) {
    return door.wait(*request->handle, now_s() + timeout_s, {});
  }

  LoopbackHub hub{2};
  Bell* bell = new Bell;
  Station station{
      quiet_config(), hub.connect(0), std::unique_ptr<Channel>(bell), {"here", "there"}};
  Door door{station};
};

TEST_F(DoorTest, WhatIsUrgentWakesTheDriver) {
  barrier("waited for");
  EXPECT_EQ(bell->rung, 0);
  barrier("in company", Urgency::kSoon);
  barrier("and more of it", Urgency::kSoon);
  EXPECT_EQ(bell->rung, 0);
  EXPECT_EQ(bell->later, 0);  // who waits for the first will take them
  barrier("at once", Urgency::kNow);
  EXPECT_EQ(bell->rung, 1);
  EXPECT_EQ(taken().size(), 4u);
  barrier("alone", Urgency::kSoon);
  EXPECT_EQ(bell->later, 1);
  EXPECT_EQ(bell->rung, 1);
}

TEST_F(DoorTest, NamesAreFreeAgainWhenDoneAndNumbersGoOn) {
  const RequestPtr first = barrier("x");
  EXPECT_CONTAINS(error_of<UsageError>([&] { barrier("x"); }), "'x' is already in flight");
  door.complete({first}, nullptr);
  EXPECT_TRUE(first->handle->done());
  barrier("x");
  EXPECT_EQ(barrier("")->seq, 1u);
  EXPECT_EQ(barrier("")->seq, 2u);
  door.count_past(0, 7);
  EXPECT_EQ(barrier("")->seq, 8u);
}

TEST_F(DoorTest, RequestsOfASetNeedItAndAPlaceInIt) {
  RequestPtr request = request_of(OpKind::kBarrier, "x", 3);
  const auto submit = [&] { door.submit(request, Urgency::kNow); };
  EXPECT_CONTAINS(error_of<UsageError>(submit), "there is no process set 3");
  EXPECT_CONTAINS(error_of<UsageError>([&] { door.ranks_of(3); }), "there is no process set 3");
  door.add_set(3, {1});
  EXPECT_CONTAINS(error_of<UsageError>(submit), "rank 0 is not in process set 3");
  door.remove_set(3);
  EXPECT_CONTAINS(error_of<UsageError>(submit), "there is no process set 3");
  EXPECT_TRUE(taken().empty());
}

TEST_F(DoorTest, OneDrivesAndTheOthersWaitForTheirTurn) {
  const RequestPtr mine = barrier("mine"), others = barrier("others'");
  ASSERT_EQ(wait(mine), Door::Wait::kDrive);
  EXPECT_TRUE(bell->silent);
  EXPECT_TRUE(door.caller_drives());
  EXPECT_EQ(wait(others, 0.01), Door::Wait::kLate);
  std::thread other([&] {
    ASSERT_EQ(wait(others), Door::Wait::kDrive);
    door.complete({others}, nullptr);
    door.hand_on(/*more=*/false);
  });
  EXPECT_EQ(taken().size(), 2u);
  door.complete({mine}, nullptr);
  const int rung = bell->rung;
  door.hand_on(/*more=*/true);
  EXPECT_GT(bell->rung, rung);
  other.join();
  EXPECT_FALSE(bell->silent);
  EXPECT_EQ(wait(mine), Door::Wait::kDone);
}

TEST_F(DoorTest, NobodyIsDrivenAfterAStop) {
  const RequestPtr request = barrier("x");
  door.stop();
  EXPECT_CONTAINS(error_of<UsageError>([&] { barrier("y"); }), "shut down");
  EXPECT_EQ(wait(request, 0.01), Door::Wait::kLate);  // that is the coordination thread's work
  const auto nothing = [] {};
  EXPECT_EQ(door.take_over(nothing), Door::Turn::kStop);
  EXPECT_FALSE(door.caller_drives());
  EXPECT_EQ(taken().size(), 1u);
  EXPECT_FALSE(door.hand_back(Door::Turn::kStop, /*through=*/true));
  EXPECT_TRUE(door.wait_stopped(0));
}

TEST_F(DoorTest, WhatCameMeanwhileIsLookedAt) {
  ASSERT_EQ(door.take_over([] {}), Door::Turn::kDrive);
  barrier("x", Urgency::kNow);
  EXPECT_TRUE(door.hand_back(Door::Turn::kDrive, false));
  ASSERT_EQ(door.take_over([] {}), Door::Turn::kDrive);
  EXPECT_EQ(taken().size(), 1u);
  EXPECT_FALSE(door.hand_back(Door::Turn::kDrive, false));
  door.stop();
  EXPECT_TRUE(door.hand_back(Door::Turn::kDrive, false));
}

// What it finds is the driver's, also what goes wrong.
TEST_F(DoorTest, WhoIsAskedLendsTheEngine) {
  const RequestPtr request = barrier("x");
  std::atomic<int> looked{0};
  int enough = 3;
  const Interrupted interrupted = [&] {
    wait_until([&] { return looked >= enough; });
    return true;
  };
  ASSERT_EQ(door.wait(*request->handle, now_s() + kHangS, interrupted), Door::Wait::kDrive);
  std::thread coordinator([&] {
    EXPECT_EQ(door.take_over([&] { ++looked; }), Door::Turn::kLent);
    EXPECT_EQ(door.take_over([&] {
      looked = 1 << 20;
      throw PeerError("rank 1 is gone");
    }),
              Door::Turn::kLent);
  });
  ASSERT_TRUE(door.can_ask());
  EXPECT_TRUE(door.ask());
  enough = 1 << 20;
  EXPECT_CONTAINS(error_of<PeerError>([&] { door.ask(); }), "rank 1 is gone");
  coordinator.join();
  door.hand_on(/*more=*/false);
  EXPECT_FALSE(door.can_ask());
}

TEST_F(DoorTest, TheFirstFailureStays) {
  const RequestPtr request = barrier("x");
  EXPECT_TRUE(door.fail(make_failure(ErrorKind::kPeer, "rank 1 is gone")));
  EXPECT_FALSE(door.fail(make_failure(ErrorKind::kInternal, "a consequence")));
  EXPECT_CONTAINS(error_of<PeerError>([&] { barrier("y"); }), "rank 1 is gone");
  door.complete({request}, door.failure());
  EXPECT_EQ(wait(request), Door::Wait::kDone);
  EXPECT_CONTAINS(error_of<PeerError>([&] { request->handle->rethrow(); }), "rank 1 is gone");
}

TEST_F(DoorTest, AChildIsRefused) {
  const RequestPtr request = barrier("x");
  door.become_child();
  EXPECT_CONTAINS(error_of<UsageError>([&] { barrier("y"); }), "forked");
  EXPECT_CONTAINS(error_of<UsageError>([&] { wait(request); }), "forked");
  EXPECT_CONTAINS(error_of<UsageError>([&] { door.wait_values(*request->handle, 0); }), "forked");
}

}  // namespace
}  // namespace bagua
