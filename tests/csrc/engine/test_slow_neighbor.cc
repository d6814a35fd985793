// What a rank that is slow, because it was stopped say, does to one of its node that has given it
// up meanwhile: it may still read what it was shown, and write there.
#include <gtest/gtest.h>

#include <cstring>

#include "engine/mute_world.h"

namespace bagua {
namespace {

constexpr int64_t kFew = 1000, kMany = 10000;  // in one step, and in several

RequestPtr sum_at(char* data, int64_t count) {
  RequestPtr request = request_of(OpKind::kAllreduce, "x");
  request->description.add_tensor(DType::kF32, {count});
  request->parts.push_back({data, data});
  return request;
}

// Rank 1, next to rank 0.
class SlowNeighbor {
 public:
  SlowNeighbor(const NodeOf& node_of, const std::string& allreduce, int64_t count)
      : world_(node_of, 1, impatient(allreduce)),
        count_(count),
        more_(node_of.size(), std::vector<float>(static_cast<size_t>(count), 1)) {}

  Engine& rank_0() { return *world_.engines[0]; }
  void end_rank_0() { world_.engines[0].reset(); }
  // They begin to reduce, for which rank 1 goes so many steps, and rank 0 gives up.
  void reduce(char* data, std::shared_ptr<char> keepalive, int steps) {
    const size_t nbytes = static_cast<size_t>(count_) * sizeof(float);
    const auto mine = world_.node().arenas()->allocate(nbytes);
    std::vector<RequestPtr> requests{sum_at(data, count_)};
    requests[0]->keepalive = std::move(keepalive);
    for (size_t rank = 1; rank < more_.size(); ++rank)
      requests.push_back(sum_at(reinterpret_cast<char*>(more_[rank].data()), count_));
    const auto texts = world_.exchange(requests, true, [&] {
      Node& node = world_.node();
      for (; steps > 0; --steps) node.tell(0, {node.arenas()->find(mine.get(), nbytes), 0});
      while (!node.heard(0)) node.sleep(1000);
      shown_ = node.note_of(0).place;
    });
    EXPECT_CONTAINS(texts[0], "made no progress");
  }
  // What rank 0 has shown it.
  char* shown() {
    if (shown_.nowhere()) throw InternalError("rank 0 has shown nothing");
    return world_.node().at(0, shown_);
  }

 private:
  static Config impatient(const std::string& allreduce) {
    Config config = quiet_config();
    config.allreduce = allreduce;
    config.stall_fail_s = 0.5;
    return config;
  }
  MuteWorld world_;
  const int64_t count_;
  std::vector<std::vector<float>> more_;  // of the other ranks
  Place shown_;
};

TEST(SlowNeighbor, ReadsWhatItWasShownAfterTheEngineHasEnded) {
  SlowNeighbor slow({0, 0}, "auto", kFew);
  std::vector<float> data(kFew, 3);
  slow.reduce(reinterpret_cast<char*>(data.data()), nullptr, 0);
  slow.end_rank_0();
  const auto* seen = reinterpret_cast<const float*>(slow.shown());
  EXPECT_EQ(std::vector<float>(seen, seen + kFew), data);
}

// Nothing that rank 0 has got since changes by it.
void check_writes(SlowNeighbor& slow) {
  constexpr size_t nbytes = kMany * sizeof(float);
  const auto fresh = slow.rank_0().allocate(nbytes);
  std::memset(slow.shown(), 'w', nbytes);
  EXPECT_EQ(std::string(fresh.get(), nbytes), std::string(nbytes, 0));
}

TEST(SlowNeighbor, WritesToAnArenaThatNobodyHasAnyMore) {
  for (const char* allreduce : {"auto", "hierarchical"})
    for (const NodeOf& node_of : {NodeOf{0, 0}, NodeOf{0, 0, 1}}) {
      SlowNeighbor slow(node_of, allreduce, kMany);
      auto arena = slow.rank_0().allocate(kMany * sizeof(float));
      char* data = arena.get();
      slow.reduce(data, std::move(arena), 1);
      check_writes(slow);
    }
}

// Between nodes, what is not in an arena is reduced in the engine's.
TEST(SlowNeighbor, WritesToScratchMemory) {
  for (const NodeOf& node_of : {NodeOf{0, 0}, NodeOf{0, 0, 1}}) {
    SlowNeighbor slow(node_of, "hierarchical", kMany);
    std::vector<float> data(kMany, 1);
    slow.reduce(reinterpret_cast<char*>(data.data()), nullptr, 1);
    check_writes(slow);
  }
}

}  // namespace
}  // namespace bagua
