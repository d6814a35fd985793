// Who answers, and who says that it only waits, by a clock of our own.
#include "engine/liveness.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "control/loopback_channel.h"

namespace bagua {
namespace {

constexpr double kTimeoutS = 5;

// Rank 0 looks after rank 1.
class LivenessTest : public testing::Test {
 protected:
  // Rank 0 asks; what rank 1 has to say is on its way.
  void ask() {
    now_s_ += 1;
    EXPECT_EQ(rank_0_.tick(now_s_, /*waiting=*/true), -1);
    pass(*channel_1_, rank_1_);
  }
  void hear() { pass(*channel_0_, rank_0_); }
  bool waits() const { return rank_0_.waits(1, traffic_0_); }

  std::optional<Traffic> traffic_1_;  // of rank 1, if it only waits
  Traffic traffic_0_;                 // as rank 0 knows
  double now_s_ = 100;

 private:
  void pass(Channel& channel, Liveness& to) const {
    std::vector<Message> inbox;
    channel.receive(0, inbox);
    for (const Message& message : inbox)
      EXPECT_TRUE(to.handle(message, Reader(message.bytes).get<MessageType>(), now_s_));
  }
  LoopbackSwitchboard board_{2};
  std::unique_ptr<Channel> channel_0_ = board_.connect(0), channel_1_ = board_.connect(1);

 protected:
  Liveness rank_0_{*channel_0_, 0, 2, kTimeoutS, [] { return std::nullopt; }};
  Liveness rank_1_{*channel_1_, 1, 2, kTimeoutS, [this] { return traffic_1_; }};
};

TEST_F(LivenessTest, ARankThatOnlyWaitsSaysSo) {
  EXPECT_FALSE(waits());
  traffic_1_ = traffic_0_ = {3, 2};
  ask();
  EXPECT_FALSE(waits()) << "before it is heard";
  hear();
  EXPECT_TRUE(waits());
  EXPECT_FALSE(rank_0_.waits(0, traffic_0_)) << "this one does not";
  traffic_1_.reset();
  ask();
  hear();
  EXPECT_FALSE(waits());
}

TEST_F(LivenessTest, AnAnswerCountsUntilAnythingIsSaid) {
  traffic_1_ = traffic_0_ = {3, 2};
  ask();
  ++traffic_0_.decisions;  // which ends its waiting, though it has answered before
  hear();
  EXPECT_FALSE(waits());
  traffic_1_ = traffic_0_;
  ask();
  hear();
  EXPECT_TRUE(waits());
  ++traffic_1_->reports;  // and the answer overtakes that
  ask();
  hear();
  EXPECT_FALSE(waits());
  ++traffic_0_.reports;
  EXPECT_TRUE(waits());
}

TEST_F(LivenessTest, AnAnswerOfLongAgoDoesNotCount) {
  traffic_1_ = traffic_0_ = {1, 0};
  ask();
  hear();
  now_s_ += 3;  // in which nobody asked
  ask();
  EXPECT_FALSE(waits());
  hear();
  EXPECT_TRUE(waits());
}

TEST_F(LivenessTest, ARankThatDoesNotAnswerIsFound) {
  ask();
  hear();
  const double heard_s = now_s_;
  int silent = -1;
  while (silent < 0 && now_s_ < heard_s + 100) silent = rank_0_.tick(now_s_ += 1, /*waiting=*/true);
  EXPECT_EQ(silent, 1);
  EXPECT_GT(now_s_, heard_s + kTimeoutS);
  EXPECT_LT(now_s_, heard_s + kTimeoutS + 3);
}

}  // namespace
}  // namespace bagua
