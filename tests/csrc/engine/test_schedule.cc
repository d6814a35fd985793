#include "engine/schedule.h"

#include <gtest/gtest.h>

#include "collective/collective.h"

namespace bagua {
namespace {

using Groups = std::vector<std::vector<int>>;

Description of(OpKind kind, ReduceOp op = ReduceOp::kSum, double prescale = 1) {
  Description d;
  d.kind = kind;
  d.op = op;
  d.prescale = prescale;
  return d;
}
const Description kSum = of(OpKind::kAllreduce), kMax = of(OpKind::kAllreduce, ReduceOp::kMax);

TEST(Schedule, NothingGivesNothing) { EXPECT_EQ(schedule({}, 100), Groups{}); }

TEST(Schedule, FusesUpToTheLimit) {
  const std::vector<Candidate> candidates = {{&kSum, 40}, {&kSum, 40}, {&kSum, 40}, {&kSum, 20}};
  EXPECT_EQ(schedule(candidates, 100), (Groups{{0, 1, 3}, {2}}));
  EXPECT_EQ(schedule(candidates, 80), (Groups{{0, 1}, {2, 3}}));
  EXPECT_EQ(schedule(candidates, 0), (Groups{{0}, {1}, {2}, {3}}));
}

TEST(Schedule, LargeOnesGoAlone) {
  EXPECT_EQ(schedule({{&kSum, 10}, {&kSum, 100}, {&kSum, 10}}, 100), (Groups{{0, 2}, {1}}));
}

TEST(Schedule, EmptyTensorsFuseToo) {
  EXPECT_EQ(schedule({{&kSum, 0}, {&kSum, 0}}, 1), (Groups{{0, 1}}));
}

TEST(Schedule, UnlikeRequestsStayApart) {
  const Description scaled = of(OpKind::kAllreduce, ReduceOp::kSum, 0.5);
  const Description adasum = of(OpKind::kAllreduce, ReduceOp::kAdasum);
  const Description gather = of(OpKind::kAllgather), barrier = of(OpKind::kBarrier);
  const std::vector<Candidate> candidates = {{&kSum, 1},   {&kMax, 1},   {&scaled, 1},
                                             {&adasum, 1}, {&gather, 1}, {&barrier, 0},
                                             {&kSum, 1},   {&adasum, 1}, {&gather, 1}};
  EXPECT_EQ(schedule(candidates, 100), (Groups{{0, 6}, {1}, {2}, {3}, {4}, {5}, {7}, {8}}));
}

TEST(Schedule, WhatGoesThroughOneCodecSharesAGroupUpToALimitOfItsOwn) {
  Description u8 = kSum, u4 = kSum, ring = kSum, near = kSum, device = kSum;
  u8.codec = ring.codec = near.codec = device.codec = "minmax_u8";
  u4.codec = "minmax_u4";
  ring.peers = "ring:0:0";
  near.exact_in_nodes = true;
  device.on_device = true;
  const int64_t half = int64_t{kAheadNbytes} / 2;
  const std::vector<Candidate> candidates = {{&u8, half},  {&kSum, 1},  {&u4, 1}, {&u8, half - 1},
                                             {&ring, 1},   {&near, 1},  {&u8, 2}, {&ring, 1},
                                             {&device, 1}, {&device, 1}};
  EXPECT_EQ(schedule(candidates, 100), (Groups{{0, 3}, {1}, {2}, {4}, {5}, {6}, {7}, {8}, {9}}));
}

TEST(Schedule, HigherPriorityGoesFirstAndEqualOnesKeepTheirOrder) {
  Description sum = kSum, max = kMax;
  sum.priority = max.priority = 5;
  const std::vector<Candidate> candidates = {{&kSum, 60}, {&max, 60}, {&sum, 60}, {&kMax, 60}};
  EXPECT_EQ(schedule(candidates, 100), (Groups{{1}, {2}, {0}, {3}}));
}

}  // namespace
}  // namespace bagua
