// Codecs that are exact inside nodes, on devices of several nodes.
#include "engine/nccl_nodes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/coded.h"
#include "common/clock.h"
#include "engine/bucket_there.h"
#include "kernel/half.h"

namespace bagua {
namespace {

using Values = std::vector<float>;

Description through(const std::string& codec, ReduceOp op = ReduceOp::kAverage) {
  Description how;
  how.codec = codec;
  how.exact_in_nodes = true;
  how.op = op;
  return how;
}

// All ranks in one loop, block by block.
class NodesOracle {
 public:
  NodesOracle(const NodeOf& node_of, const std::string& codec, Finish finish, int64_t count)
      : coding_(parse_coding(codec)), finish_(finish), count_(count), results_lost(zeros()) {
    for (size_t rank = 0; rank < node_of.size(); ++rank)
      ranks_[node_of[rank]].push_back(static_cast<int>(rank));
    leaders_ = node_of.size();
    for (const auto& [node, ranks] : ranks_) {
      leaders_ = std::min(leaders_, ranks.size());
      lost[node] = zeros();
    }
  }

  Values step(int round) {
    std::map<int, Values> sums;
    for (const auto& [node, ranks] : ranks_) {
      sums[node] = zeros();
      for (const int rank : ranks)
        for (int64_t i = 0; i < count_; ++i) sums[node][i] += given_by(rank, round, i);
    }
    Values results = zeros();
    const int64_t piece = std::max<int64_t>(coding_.block(), 64);
    const int64_t pieces = (count_ + piece - 1) / piece;
    int64_t begin = 0;
    for (size_t leader = 0; leader < leaders_; ++leader) {
      const auto mine =
          static_cast<int64_t>((static_cast<size_t>(pieces) + leaders_ - 1 - leader) / leaders_);
      const int64_t end = std::min(begin + mine * piece, count_);
      Finish finish = finish_;
      // A GPU multiplies what NCCL has added up.
      if (coding_.codec->sparse && end > begin &&
          goes_densely(static_cast<int>(ranks_.size()), coding_.wire_nbytes(end - begin),
                       end - begin))
        finish = {1, finish_.factor / finish_.divisor};
      for (; begin < end; begin += coding_.block())
        exchange(leader, begin, std::min(coding_.block(), end - begin), finish, sums, results);
      begin = std::min(begin, count_);
    }
    return results;
  }

 private:
  const Coding coding_;
  const Finish finish_;
  const int64_t count_;
  std::map<int, std::vector<int>> ranks_;  // by node
  size_t leaders_;

  Values zeros() const { return Values(static_cast<size_t>(count_)); }

  // A block, between the nodes, in the order of those who lead there.
  void exchange(size_t leader, int64_t begin, int64_t n, Finish finish, std::map<int, Values>& sums,
                Values& results) {
    std::map<int, int> nodes;
    for (const auto& [node, ranks] : ranks_) nodes[ranks[leader]] = node;
    std::vector<std::vector<char>> wires;
    std::vector<const char*> said;
    for (const auto& [rank, node] : nodes) {
      wires.emplace_back(static_cast<size_t>(coding_.wire_nbytes(n)));
      coding_.encode_rest(&sums[node][begin], &lost[node][begin], n, wires.back().data());
    }
    for (const auto& wire : wires) said.push_back(wire.data());
    coding_.add_up(said, finish, n, &results[begin]);
    if (coding_.codec->sparse) return;
    coding_.encode_rest(&results[begin], &results_lost[begin], n, wires[0].data());
    coding_.decode(wires[0].data(), n, &results[begin]);
  }

 public:
  std::map<int, Values> lost;  // of a node's sums
  Values results_lost;
};

struct Case {
  std::string codec;
  DType dtype;
  ReduceOp op;
  double prescale, postscale;
  int64_t count;
};

// What ranks keep of values that one of them sees to: that one's, and zeros.
Values together(const std::vector<Values>& kept, const std::vector<int>& ranks) {
  Values all = kept[static_cast<size_t>(ranks[0])];
  for (size_t j = 1; j < ranks.size(); ++j)
    for (size_t i = 0; i < all.size(); ++i) {
      const float theirs = kept[static_cast<size_t>(ranks[j])][i];
      EXPECT_TRUE(all[i] == 0 || theirs == 0) << "two ranks keep something of value " << i;
      if (theirs != 0) all[i] = theirs;
    }
  return all;
}

void expect_as_told(const NodeOf& node_of, const Case& c) {
  SCOPED_TRACE(name_of(node_of) + " " + c.codec + " " + dtype_name(c.dtype) + " " +
               std::to_string(c.count));
  constexpr int kRounds = 3;
  const auto n = static_cast<int>(node_of.size());
  const int before = FakeNccl::calls(), misused = FakeNccl::misused();
  std::vector<std::vector<Values>> results(node_of.size());
  std::vector<Values> kept[2];
  for (auto& each : kept) each.resize(node_of.size());
  GpuWorld world(node_of);
  world.run([&](int rank, Gpu& gpu, Engine&) {
    Description how = through(c.codec, c.op);
    how.prescale = c.prescale;
    how.postscale = c.postscale;
    BucketThere there(world.ranks, rank, gpu, how, c.count, c.dtype);
    for (int round = 0; round < kRounds; ++round)
      results[rank].push_back(there.exchange([=](int64_t i) { return given_by(rank, round, i); }));
    for (size_t i = 0; i < 2; ++i) kept[i][rank] = there.kept(i);
  });
  EXPECT_GE(FakeNccl::calls() - before, 3 * kRounds) << "they go by NCCL";
  EXPECT_EQ(FakeNccl::misused(), misused);

  const Finish finish{c.op == ReduceOp::kAverage ? static_cast<double>(n) : 1,
                      c.prescale * c.postscale};
  NodesOracle oracle(node_of, c.codec, finish, c.count);
  for (int round = 0; round < kRounds; ++round) {
    Values expected = oracle.step(round);
    if (c.dtype == DType::kBF16)
      for (float& x : expected) x = to_float(to_bf16(x));
    for (int rank = 0; rank < n; ++rank)
      EXPECT_EQ(results[rank][round], expected) << "rank " << rank << " round " << round;
  }
  std::map<int, std::vector<int>> ranks;
  std::vector<int> everyone;
  for (int rank = 0; rank < n; ++rank) {
    ranks[node_of[rank]].push_back(rank);
    everyone.push_back(rank);
  }
  for (const auto& [node, theirs] : ranks)
    EXPECT_EQ(together(kept[0], theirs), oracle.lost[node]) << "node " << node;
  EXPECT_EQ(together(kept[1], everyone), oracle.results_lost);
}

class NcclNodesOf : public testing::TestWithParam<NodeOf> {};
INSTANTIATE_TEST_SUITE_P(NcclNodes, NcclNodesOf,
                         testing::Values(NodeOf{0, 0, 1, 1}, NodeOf{0, 0, 0, 1, 1},
                                         NodeOf{0, 1, 0, 1}, NodeOf{0, 0, 1},
                                         NodeOf{0, 1, 1, 2, 0, 2}),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(NcclNodesOf, AddUpNodesAndCodeBetweenThem) {
  for (const std::string codec : {"minmax_u8", "sign1", "topk"}) {
    const int64_t block = parse_coding(codec).block();
    for (const int64_t count : {int64_t{1}, block, block + 1, 2 * block - 1, 7 * block + 3}) {
      expect_as_told(GetParam(), {codec, DType::kF32, ReduceOp::kAverage, 1, 1, count});
      if (count <= block) continue;
      expect_as_told(GetParam(), {codec, DType::kF32, ReduceOp::kSum, 2, 0.75, count});
      expect_as_told(GetParam(), {codec, DType::kBF16, ReduceOp::kAverage, 1, 0.5, count});
    }
  }
}

// Of codecs without blocks slices are cut elsewhere.
TEST_P(NcclNodesOf, CutSingleValuesToo) {
  for (const std::string codec : {"fp16", "raw"})
    for (const int64_t count : {1, 63, 65, 1000})
      expect_as_told(GetParam(), {codec, DType::kF32, ReduceOp::kSum, 1, 0.5, count});
}

// NCCL's own average would be that of the leaders.
TEST(NcclNodes, WhatGoesDenselyIsDividedByAllRanks) {
  for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum})
    expect_as_told({0, 0, 1, 1}, {"topk:4000", DType::kF32, op, 1, 0.5, 3 * 4096 + 5});
}

// Where slices begin alike, or there is one, the bits are those of the host.
TEST(NcclNodes, CodesLikeACpu) {
  for (const NodeOf& node_of : {NodeOf{0, 0, 1}, NodeOf{0, 1, 0, 1}})
    for (const std::string codec : {"minmax_u8", "sign1", "topk"}) {
      const int64_t count = 8 * parse_coding(codec).block();
      const int before = FakeNccl::calls();
      GpuWorld world(node_of);
      world.run([&](int rank, Gpu& gpu, Engine& engine) {
        BucketThere there(world.ranks, rank, gpu, through(codec), count);
        Bucket here(world.ranks.engines[static_cast<size_t>(rank)], "here", DType::kF32, {count},
                    through(codec), 0, 0, 2);
        auto* on_host = reinterpret_cast<float*>(here.data());
        const auto read = [&](const float* data) { return Values(data, data + count); };
        for (int round = 0; round < 3; ++round) {
          const auto value = [=](int64_t i) { return given_by(rank, round, i); };
          for (int64_t i = 0; i < count; ++i) on_host[i] = value(i);
          finish(engine, here.launch(Urgency::kNow));
          EXPECT_EQ(there.exchange(value), read(on_host)) << codec << " round " << round;
          for (size_t i = 0; i < 2; ++i)
            EXPECT_EQ(there.kept(i), read(here.kept()[i].get())) << codec << " kept " << i;
        }
      });
      EXPECT_GT(FakeNccl::calls(), before);
    }
}

// Communicators are made for those who need them, once, and end with their process set.
TEST(NcclNodes, AreMadeWhenTheyAreNeeded) {
  const int begun = FakeNccl::begun(), finalized = FakeNccl::finalized();
  {
    GpuWorld world(NodeOf{0, 0, 1, 1, 2});
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      const auto use = [&](int32_t set, Description how, float expected) {
        BucketThere there(world.ranks, rank, gpu, how, 1000, DType::kF32, set);
        EXPECT_EQ(there.exchange([](int64_t) { return 1.0f; }), all(1000, expected));
      };
      const auto expect_begun = [&](int count) {
        sum_of_ones(engine, "all are here");
        EXPECT_EQ(FakeNccl::begun() - begun, count);
        sum_of_ones(engine, "before any goes on");
      };
      use(0, {}, 5);
      Description everywhere = through("minmax_u8", ReduceOp::kSum);
      everywhere.exact_in_nodes = false;
      use(0, everywhere, 5);
      expect_begun(5);
      const int32_t one_node = add_set(engine, {0, 1}), apart = add_set(engine, {0, 2, 4});
      const Description exact = through("minmax_u8", ReduceOp::kSum);
      if (rank < 2) use(one_node, exact, 2);
      if (rank % 2 == 0) use(apart, exact, 3);
      const int all_of_them = 5 + 2 + 3;
      expect_begun(all_of_them);
      const int32_t some = add_set(engine, {0, 1, 2, 3});
      for (int i = 0; i < 3; ++i)
        if (rank < 4) use(some, exact, 4);
      expect_begun(all_of_them + 3 * 4);
      remove_set(engine, some);
      const double late_s = now_s() + kHangS / 2;
      for (Values waits{1}; waits[0] > 0;) {  // all alike, and engines have something to do
        waits[0] = FakeNccl::finalized() < finalized + 3 * 4 && now_s() < late_s;
        call(engine, allreduce_of("wait", waits));
      }
      EXPECT_EQ(FakeNccl::finalized() - finalized, 3 * 4)
          << "all, the node and the leaders of each";
      use(0, exact, 5);
      // One of the five is alone on its node, so only the first of each node leads.
      expect_begun(all_of_them + 3 * 4 + 4 + 3);
    });
  }
  EXPECT_EQ(FakeNccl::finalized() - finalized, FakeNccl::begun() - begun);
}

// Whatever the device still has to do.
TEST(NcclNodes, AreMadeWhileOthersAreUnderWay) {
  GpuWorld world(NodeOf{0, 0, 1});
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::atomic<bool> go{false};
    Values values(1000);
    Program other(gpu.device);
    other.hold(go);
    other.compute(values, 1);
    RequestPtr plain = other.on_device(allreduce_of("plain", values));
    plain->description.on_device = true;
    finish(engine, engine.submit(plain, Urgency::kNow));
    BucketThere there(world.ranks, rank, gpu, through("minmax_u8", ReduceOp::kSum), 1000);
    there.compute([](int64_t) { return 1.0f; });
    const HandlePtr handle = there.launch();
    finish(engine, handle);
    go = true;
    EXPECT_EQ(there.read(handle), all(1000, 3));
  });
}

TEST(NcclNodes, AreCapturedOnceTheyAreThere) {
  constexpr int64_t kCount = 5000;
  GpuWorld world(NodeOf{0, 0, 1});
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    const Description how = through("minmax_u8");
    Values values(100);
    gpu.compute(values, 1);
    gpu.exchange(engine, allreduce_of("plain", values), values);

    BucketThere there(world.ranks, rank, gpu, how, kCount);
    int round = 0;
    const auto give = [&] {
      there.compute([rank, &round](int64_t i) { return given_by(rank, round, i); });
      return there.launch();
    };
    const auto early = gpu.device.capture(gpu.stream);
    EXPECT_CONTAINS(error_of<UsageError>([&] { finish(engine, give()); }),
                    "one exchange before the capture");
    PretendDevice::end(*early);

    BucketThere at_once(world.ranks, rank, gpu, how, kCount);
    at_once.exchange([=](int64_t i) { return given_by(rank, 0, i); });
    const auto graph = gpu.device.capture(gpu.stream);
    const HandlePtr handle = give();
    finish(engine, handle);
    gpu.take(handle);
    PretendDevice::end(*graph);
    for (round = 1; round < 4; ++round) {
      const int now = round;
      gpu.device.replay(gpu.stream, graph);
      gpu.device.drain(gpu.stream);
      const auto* data = reinterpret_cast<const float*>(there.bucket.data());
      const Values seen(data, data + kCount);
      // The one has seen one round more, whose losses are in what it keeps.
      BucketThere fresh(world.ranks, rank, gpu, how, kCount);
      Values expected;
      for (int again = 1; again <= now; ++again)
        expected = fresh.exchange([=](int64_t i) { return given_by(rank, again, i); });
      EXPECT_EQ(seen, expected) << round;
    }
  });
}

// ---- where it cannot be ----------------------------------------------------------------------

// Each communicator has a size of its own: 4 are all, 3 those of the first node, 2 who lead.
const NodeOf kThreeAndOne = {0, 0, 0, 1};

// What ranks exchange, and how many of NCCL's operations that took.
void expect_sums(GpuWorld& world, const Description& how, int at_least, int at_most) {
  const int before = FakeNccl::calls();
  world.run([&](int rank, Gpu& gpu, Engine&) {
    BucketThere there(world.ranks, rank, gpu, how, 1000);
    for (int i = 0; i < 2; ++i)
      EXPECT_EQ(there.exchange([](int64_t) { return 1.0f; }), all(1000, 4)) << how.codec;
  });
  EXPECT_GE(FakeNccl::calls() - before, at_least) << how.codec;
  EXPECT_LE(FakeNccl::calls() - before, at_most) << how.codec;
}

constexpr int kAnyNumber = 1 << 30;

Config told(const std::string& level) {
  Config config = quiet_config(kThreeAndOne);
  config.log_level = level;
  return config;
}

size_t times(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(NcclNodes, HowTheyGoIsToldOnce) {
  testing::internal::CaptureStderr();
  {
    GpuWorld world(kThreeAndOne, told("info"));
    expect_sums(world, through("minmax_u8", ReduceOp::kSum), 3, kAnyNumber);
  }
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(times(text, "exact inside nodes: NCCL within, and between 1 leaders of each"), 4u)
      << text;
}

// Expects that only these codecs go by the host, now and later, and that one rank warns of it.
std::string what_is_told_of_the_host(const std::function<void(GpuWorld&)>& prepare) {
  testing::internal::CaptureStderr();
  {
    GpuWorld world(kThreeAndOne, told("warning"));
    prepare(world);
    for (int i = 0; i < 2; ++i) {
      expect_sums(world, through("minmax_u8", ReduceOp::kSum), 0, 0);
      expect_sums(world, through("", ReduceOp::kSum), 2 * 4, 2 * 4);
    }
  }
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(times(text, "what is exact only inside nodes goes by the host's memory"), 1u) << text;
  EXPECT_EQ(times(text, "arning"), 1u) << text;
  return text;
}

TEST(NcclNodes, GoByTheHostWhereAGpuIsTooOldForKernels) {
  const std::string text =
      what_is_told_of_the_host([](GpuWorld& world) { world.gpus[2]->own.be_old(); });
  EXPECT_CONTAINS(text, "a rank's GPU is older");
}

// As where NCCL finds no network between two machines, or no way inside one.
TEST(NcclNodes, GoByTheHostWhereOneDoesNotBegin) {
  for (const std::vector<int>& members : {std::vector<int>{0, 1, 2}, {0, 3}})
    for (size_t broken = 0; broken < members.size(); ++broken)
      for (const auto says : {FakeNccl::Says::kAtOnce, FakeNccl::Says::kLater}) {
        const int begun = FakeNccl::begun(), aborted = FakeNccl::aborted();
        const auto size = static_cast<int>(members.size());
        const std::string text = what_is_told_of_the_host(
            [&](GpuWorld&) { FakeNccl::break_on(static_cast<int>(broken), says, size); });
        FakeNccl::break_on(-1);
        EXPECT_CONTAINS(text,
                        "rank " + std::to_string(members[broken]) + ": ncclCommInitRankConfig");
        // In the end all are aborted: those for nodes at once, that of all when the ranks leave.
        EXPECT_EQ(FakeNccl::begun() - begun, 4 + 3 + (size == 2 ? 2 : 0)) << size;
        EXPECT_EQ(FakeNccl::aborted() - aborted, FakeNccl::begun() - begun) << size;
      }
}

// A rank that gets no id says so, and those that others have got are for the next time.
TEST(NcclNodes, GoByTheHostWhereNcclGivesNoId) {
  static const NcclLibrary poor = [] {
    NcclLibrary library = FakeNccl::library();
    library.get_unique_id = [](NcclId*) { return NcclResult::kSystemError; };
    return library;
  }();
  const int ids = FakeNccl::ids(), begun = FakeNccl::begun();
  testing::internal::CaptureStderr();
  {
    const NodeOf node_of = {0, 0, 1, 1, 2, 2};
    Config config = quiet_config(node_of);
    config.log_level = "warning";
    GpuWorld world(node_of, config);
    world.gpus[2]->own.use_nccl(&poor);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      const auto use = [&](int32_t set, const std::string& codec, float expected) {
        BucketThere there(world.ranks, rank, gpu, through(codec, ReduceOp::kSum), 1000, DType::kF32,
                          set);
        EXPECT_EQ(there.exchange([](int64_t) { return 1.0f; }), all(1000, expected));
      };
      use(0, "minmax_u8", 6);
      const int32_t most = add_set(engine, {0, 1, 3, 4, 5}), last = add_set(engine, {4, 5});
      if (rank != 2) use(most, "", 5);
      if (rank >= 4) use(last, "", 2);
    });
  }
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_CONTAINS(text, "goes by the host's memory: rank 2: ncclGetUniqueId failed");
  EXPECT_EQ(FakeNccl::begun() - begun, 6 + 5 + 2) << "all of each set, and none for nodes";
  EXPECT_EQ(FakeNccl::ids() - ids, 1 + 2) << "of all, and of two nodes, which others use";
}

RequestPtr coded_sum_of(Values& values) {
  RequestPtr request = allreduce_of("x", values);
  request->description.codec = "minmax_u8";
  request->description.exact_in_nodes = true;
  return request;
}

// Of the near ones it is rank 1, whom the others of its node wait for, of the far ones rank 3.
TEST(NcclNodes, ADeadPeerEndsTheirBeginning) {
  for (const int dies : {1, 3}) {
    FakeNccl::break_on(1, FakeNccl::Says::kNever, dies == 1 ? 3 : 2);
    GpuWorld world(kThreeAndOne);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      Values& values = gpu.lasting(1000);
      const auto handle = gpu.submit(engine, coded_sum_of(values));
      if (rank == dies) {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));  // its engine is in the middle
        return world.ranks.die(rank);
      }
      EXPECT_CONTAINS(error_of<PeerError>([&] { finish(engine, handle); }),
                      "rank " + std::to_string(dies));
    });
    FakeNccl::break_on(-1);
  }
}

// Whoever waits on the device for its node, or for leaders who do, does so no longer.
TEST(NcclNodes, ADeadPeerEndsWhatIsUnderWay) {
  for (const int dies : {1, 3}) {
    GpuWorld world(NodeOf{0, 0, 1, 1});
    expect_end_of_what_waits_for(world, dies, 4, [](Gpu& gpu, Engine& engine, auto& values) {
      return gpu.submit(engine, coded_sum_of(values), Urgency::kWaited);
    });
  }
}

// As where the network breaks between two machines only, or inside one.
TEST(NcclNodes, WhatNcclNoticesOfAPartIsAPeerError) {
  for (const int size : {3, 2}) {
    std::atomic<bool> go{false};
    std::atomic<int> here{0};
    GpuWorld world(kThreeAndOne);
    world.run([&](int, Gpu& gpu, Engine& engine) {
      Values& values = gpu.lasting(5000);
      gpu.compute(values, 1);
      EXPECT_EQ(gpu.exchange(engine, coded_sum_of(values), values), all(values.size(), 4));
      gpu.hold(go);
      RequestPtr plain = allreduce_of("y", values);
      EXPECT_TRUE(engine.wait(*gpu.submit(engine, plain), kHangS));
      for (++here; here < 4;) std::this_thread::yield();
      FakeNccl::lose_peers_of(size);
      const FailurePtr failure = wait_for_failure(engine);
      ASSERT_TRUE(failure);
      EXPECT_EQ(failure->kind, ErrorKind::kPeer);
    });
    go = true;
    FakeNccl::lose_peers_of(0);
  }
}

}  // namespace
}  // namespace bagua
