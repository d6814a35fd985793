// Averages with some peers, on devices: as on hosts, whose exchange is the oracle.
#include "engine/nccl_peers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "common/scaled.h"
#include "engine/bucket_there.h"

namespace bagua {
namespace {

constexpr int kCopies = 3;
const std::string kKinds[] = {"shift_one", "random:0:7", "ring", "exponential"};

Description with(const std::string& peers, bool exact_in_nodes = false) {
  Description how;
  how.op = ReduceOp::kAverage;
  how.peers = peers;
  how.exact_in_nodes = exact_in_nodes;
  return how;
}

// Not what sums of a few are exact for.
float odd(int rank, int round, int64_t i) { return given_by(rank, round, i) / 7; }

// What the same ranks get of the same values in the memory of their hosts.
class Here {
 public:
  Here(LoopbackWorld& world, int rank, const Description& how, int64_t count, DType dtype)
      : engine_(*world.engines[static_cast<size_t>(rank)]),
        count_(count),
        dtype_(dtype),
        bucket_(world.engines[static_cast<size_t>(rank)], "here", dtype, {count}, how, 0, 0,
                kCopies) {}
  std::vector<float> kept(size_t which) const {
    const float* values = bucket_.kept()[which].get();
    return {values, values + count_};
  }
  std::vector<float> exchange(const std::function<float(int64_t)>& value) {
    auto* floats = reinterpret_cast<float*>(bucket_.data());
    auto* halves = reinterpret_cast<BF16*>(bucket_.data());
    for (int64_t i = 0; i < count_; ++i) {
      if (dtype_ == DType::kF32) floats[i] = value(i);
      if (dtype_ == DType::kBF16) halves[i] = to_bf16(value(i));
    }
    finish(engine_, bucket_.launch(Urgency::kNow));
    std::vector<float> values;
    for (int64_t i = 0; i < count_; ++i)
      values.push_back(dtype_ == DType::kF32 ? floats[i] : to_float(halves[i]));
    return values;
  }

 private:
  Engine& engine_;
  const int64_t count_;
  const DType dtype_;
  Bucket bucket_;
};

// How many of NCCL's operations ranks gave.
int expect_as_here(const NodeOf& node_of, const Description& how, DType dtype, int64_t count,
                   int rounds) {
  const int before = FakeNccl::calls();
  GpuWorld world(node_of);
  world.run([&](int rank, Gpu& gpu, Engine&) {
    BucketThere there(world.ranks, rank, gpu, how, count, dtype);
    Here here(world.ranks, rank, how, count, dtype);
    for (int round = 0; round < rounds; ++round) {
      const auto value = [=](int64_t i) { return odd(rank, round, i); };
      EXPECT_EQ(there.exchange(value), here.exchange(value))
          << how.peers << ", " << node_of.size() << " ranks, round " << round;
    }
  });
  return FakeNccl::calls() - before;
}

TEST(NcclPeers, AverageAsOnHosts) {
  for (const int n : {2, 3, 5})
    for (const std::string& peers : kKinds)
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        Description how = with(peers);
        how.postscale = 0.75;
        EXPECT_GT(expect_as_here(nodes_of(n, 1), how, dtype, 1001, 2 * n), 0);
      }
}

// A rank that rests gives nothing to NCCL, the others two each.
TEST(NcclPeers, GiveNobodyElseAnything) {
  EXPECT_EQ(expect_as_here(nodes_of(3, 1), with("shift_one"), DType::kF32, 100, 3), 3 * 2 * 2);
}

TEST(NcclPeers, MeetInParts) {
  const int64_t count = scaled(32 << 20) / 2 + 77;  // of 16 bits
  EXPECT_EQ(expect_as_here({0, 1}, with("shift_one"), DType::kBF16, count, 1), 2 * 2 * 2);
}

// Where several share one only nodes meet, which count by their ranks.
TEST(NcclPeers, AreNodesWhereThatIsAskedFor) {
  for (const NodeOf& node_of :
       {NodeOf{0, 0, 1, 1}, {0, 0, 0, 1, 1}, {0, 1, 2, 0, 1, 2}, {0, 0, 1, 2, 2, 2}})
    for (const std::string& peers : kKinds)
      EXPECT_GT(expect_as_here(node_of, with(peers, true), DType::kF32, 8 * 64, 4), 0);
}

// On one node none is asked for, whatever they are to be: NCCL's own average does it, also of what
// a codec would carry.
TEST(NcclPeers, DoNotCountInsideOneNode) {
  for (const std::string codec : {"", "minmax_u8"}) {
    const int before = FakeNccl::calls();
    GpuWorld world(NodeOf{0, 0, 0});
    world.run([&](int rank, Gpu& gpu, Engine&) {
      Description how = with("ring", true);
      how.codec = codec;
      BucketThere there(world.ranks, rank, gpu, how, 1000);
      const auto mine = [rank](int64_t) { return static_cast<float>(rank); };
      EXPECT_EQ(there.exchange(mine), all(1000, 1));
    });
    EXPECT_EQ(FakeNccl::calls() - before, 3) << codec;
  }
}

TEST(NcclPeers, OfARankAloneAreNone) {
  Description how = with("shift_one");
  EXPECT_EQ(expect_as_here({0}, how, DType::kF32, 100, 2), 0);
  how.postscale = 0.75;  // which takes more than leaving them where they are
  EXPECT_EQ(expect_as_here({0}, how, DType::kF32, 100, 2), 2);
}

// Copies of neighbors are those of hosts, bit by bit.
TEST(NcclPeers, TellWhatTheyMovedThroughACodec) {
  const int64_t in_parts = scaled(32 << 20) / 4 + 100;
  const auto expect_alike = [](const NodeOf& node_of, const std::string& codec, int64_t count) {
    Description how = with("ring", true);
    how.codec = codec;
    const int before = FakeNccl::calls();
    GpuWorld world(node_of);
    world.run([&](int rank, Gpu& gpu, Engine&) {
      BucketThere there(world.ranks, rank, gpu, how, count, DType::kF32, 0, kCopies);
      Here here(world.ranks, rank, how, count, DType::kF32);
      for (int round = 0; round < 3; ++round) {
        const auto value = [=](int64_t i) { return odd(rank, round, i); };
        EXPECT_EQ(there.exchange(value), here.exchange(value)) << codec << ", round " << round;
        for (size_t i = 0; i < kCopies; ++i) EXPECT_EQ(there.kept(i), here.kept(i)) << codec;
      }
    });
    EXPECT_GT(FakeNccl::calls(), before) << codec;
  };
  for (const std::string codec : {"minmax_u8", "minmax_u4", "fp16"}) {
    for (const NodeOf& node_of : {NodeOf{0, 1}, {0, 1, 2}, {0, 1, 2, 3, 4}, {0, 0, 1, 1, 2}})
      expect_alike(node_of, codec, 3001);
    // Slices of two leaders begin alike.
    expect_alike({0, 0, 1, 1}, codec, 8 * std::max<int64_t>(parse_coding(codec).block(), 64));
  }
  expect_alike({0, 1}, "minmax_u8", in_parts);
}

TEST(NcclPeers, GoByTheHostWhereElementsWantThat) {
  const int before = FakeNccl::calls();
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<double> values(1000);
    gpu.device.run(gpu.stream, [&] { std::fill(values.begin(), values.end(), rank + 0.25); });
    RequestPtr request = request_of(OpKind::kAllreduce, "doubles");
    request->description.op = ReduceOp::kAverage;
    request->description.peers = "shift_one";
    request->description.add_tensor(DType::kF64, {1000});
    auto* data = reinterpret_cast<char*>(values.data());
    request->parts.push_back({data, data});
    const HandlePtr handle = gpu.submit(engine, request);
    finish(engine, handle);
    gpu.take(handle);
    gpu.device.drain(gpu.stream);
    EXPECT_EQ(values, std::vector<double>(1000, 0.75));
  });
  EXPECT_EQ(FakeNccl::calls(), before);
}

// Whom a rank meets goes by its place there.
TEST(NcclPeers, AreThoseOfTheProcessSet) {
  GpuWorld world(4);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    const int32_t set = add_set(engine, {1, 2, 3});
    if (rank == 0) return;
    const int before = FakeNccl::calls();
    BucketThere there(world.ranks, rank, gpu, with("exponential"), 100, DType::kF32, set);
    std::vector<float> expected;
    for (int round = 0; round < 2; ++round) {
      const int behind = (rank - 1 + 3 - (1 << round)) % 3 + 1;
      EXPECT_EQ(there.exchange([=](int64_t) { return static_cast<float>(rank); }),
                all(100, static_cast<float>(rank + behind) / 2));
    }
    EXPECT_GT(FakeNccl::calls(), before);
  });
}

// A graph would meet the same peers for ever.
TEST(NcclPeers, AreNotCaptured) {
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    BucketThere there(world.ranks, rank, gpu, with("shift_one"), 100);
    there.exchange([](int64_t) { return 1.0f; });
    const auto graph = gpu.device.capture(gpu.stream);
    EXPECT_CONTAINS(error_of<UsageError>([&] { finish(engine, there.launch()); }),
                    "cannot be captured in a CUDA graph");
    PretendDevice::end(*graph);
  });
}

// However far the device is behind, memory for what is received is that of one exchange.
TEST(NcclPeers, ReceiveInTheSameMemory) {
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float> firsts;
    std::atomic<bool> go{false};
    BucketThere there(world.ranks, rank, gpu, with("shift_one"), 1000);
    there.exchange([](int64_t) { return 1.0f; });
    const int before = gpu.device.allocations();
    gpu.hold(go);
    for (int round = 0; round < 20; ++round) {
      there.compute([=](int64_t i) { return given_by(rank, round, i); });
      const HandlePtr handle = there.launch();
      finish(engine, handle);
      gpu.take(handle);
      gpu.device.run(gpu.stream,
                     [&] { firsts.push_back(*reinterpret_cast<float*>(there.bucket.data())); });
    }
    EXPECT_EQ(gpu.device.allocations(), before);
    go = true;
    gpu.device.drain(gpu.stream);
    for (int round = 0; round < 20; ++round)
      EXPECT_EQ(firsts[static_cast<size_t>(round)],
                (given_by(0, round, 0) + given_by(1, round, 0)) / 2)
          << round;
  });
}

// Who finds no room for what it receives waits for what is under way, and that for a dead one.
TEST(NcclPeers, ADeadOneEndsTheWaitForRoom) {
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    const auto submit = [&](std::vector<float>& values) {
      const std::string name = "of " + std::to_string(values.size());
      RequestPtr request = allreduce_of(name, values, ReduceOp::kAverage);
      request->description.peers = "ring";
      gpu.compute(values, 1);
      return gpu.submit(engine, request, Urgency::kWaited);
    };
    std::vector<float>&few = gpu.lasting(5000), &many = gpu.lasting(50'000);
    EXPECT_EQ(gpu.read(engine, submit(few), few), all(few.size(), 1));
    if (rank == 1) gpu.hold(world.go);
    finish(engine, submit(few));
    if (rank == 0) {
      gpu.device.lend(1000);  // what it could make room with
      gpu.device.has(0);
    }
    const HandlePtr last = submit(many);
    if (rank == 0) {
      EXPECT_CONTAINS(error_of<PeerError>([&] { finish(engine, last); }), "rank 1");
      return;
    }
    finish(engine, last);
    gpu.device.fail();
    world.ranks.die(rank);
  });
  world.go = true;
}

TEST(NcclPeers, ADeadOneEndsWhatIsUnderWay) {
  GpuWorld world(3);
  expect_end_of_what_waits_for(world, 1, 1, [](Gpu& gpu, Engine& engine, auto& values) {
    RequestPtr request = allreduce_of("x", values, ReduceOp::kAverage);
    request->description.peers = "ring";
    return gpu.submit(engine, request, Urgency::kWaited);
  });
}

}  // namespace
}  // namespace bagua
