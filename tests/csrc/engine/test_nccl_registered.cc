// Arenas in memory that NCCL can register: what one rank gives so all have to.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "engine/bucket.h"
#include "engine/program.h"
#include "transport/nccl.h"

namespace bagua {
namespace {

constexpr int64_t kCount = 3000;

// A bucket of one slot, whose arena NCCL can register.
struct Arena {
  Arena(LoopbackWorld& world, int rank, Gpu& gpu, const std::string& name, const Description& how,
        int32_t set = 0)
      : engine(*world.engines[static_cast<size_t>(rank)]),
        gpu(gpu),
        bucket(world.engines[static_cast<size_t>(rank)], name, DType::kF32, {kCount}, how, set,
               /*priority=*/0, /*kept=*/0, &gpu.device, [&](size_t nbytes) {
                 return nccl_memory(FakeNccl::library(), gpu.device, nbytes);
               }) {
    bucket.use_registered();
  }
  float* values() { return reinterpret_cast<float*>(bucket.data()); }
  void compute(float value) {
    gpu.device.run(gpu.stream, [to = values(), value] { std::fill(to, to + kCount, value); });
  }
  HandlePtr launch() { return gpu.launch(bucket); }
  std::vector<float> read(const HandlePtr& handle) {
    finish(engine, handle);
    gpu.take(handle);
    std::vector<float> seen;
    gpu.device.run(gpu.stream, [&] { seen.assign(values(), values() + kCount); });
    gpu.device.drain(gpu.stream);
    return seen;
  }
  Engine& engine;
  Gpu& gpu;
  Bucket bucket;
};

Description sums() {
  Description d;
  d.op = ReduceOp::kSum;
  return d;
}

class Registered : public testing::Test {
 protected:
  const int allocated_ = FakeNccl::allocated(), misused_ = FakeNccl::misused();
  ~Registered() override {
    EXPECT_EQ(FakeNccl::allocated(), allocated_) << "memory that nobody has any more";
    EXPECT_EQ(FakeNccl::misused(), misused_);
  }
};

TEST_F(Registered, ArenasOfAllRanks) {
  const size_t before = FakeNccl::registered();
  GpuWorld world(3);
  world.run([&](int rank, Gpu& gpu, Engine&) {
    Arena arena(world.ranks, rank, gpu, "bucket", sums());
    for (int step = 0; step < 3; ++step) {
      arena.compute(static_cast<float>(rank + step));
      EXPECT_EQ(arena.read(arena.launch()), all(kCount, static_cast<float>(3 + 3 * step)));
    }
    EXPECT_GT(FakeNccl::registered(), before);
  });
}

// Its zeros are in such memory, too.
TEST_F(Registered, ARankThatHasJoined) {
  GpuWorld world(3);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    Arena arena(world.ranks, rank, gpu, "bucket", sums());
    for (int step = 0; step < 2 + rank; ++step) {
      const int left = step < 2 ? 3 : 3 - (step - 1);  // ranks that have not joined
      arena.compute(1);
      EXPECT_EQ(arena.read(arena.launch()), all(kCount, static_cast<float>(left)));
    }
    EXPECT_EQ(join(engine), 2);
    arena.compute(1);
    EXPECT_EQ(arena.read(arena.launch()), all(kCount, 3));
  });
}

// What travels through a codec is elsewhere.
TEST_F(Registered, NotWhatIsCoded) {
  const size_t before = FakeNccl::registered();
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine&) {
    Description coded = sums();
    coded.codec = "minmax_u8";
    Arena arena(world.ranks, rank, gpu, "bucket", coded);
    arena.compute(static_cast<float>(rank));
    EXPECT_EQ(arena.read(arena.launch()), all(kCount, 1));
    EXPECT_EQ(FakeNccl::registered(), before);
  });
}

// Not while the device may still be at it.
TEST_F(Registered, ABucketThatGoesIsForgotten) {
  const size_t before = FakeNccl::registered();
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    Arena stays(world.ranks, rank, gpu, "stays", sums());
    auto goes = std::make_unique<Arena>(world.ranks, rank, gpu, "goes", sums());
    std::atomic<bool> go{false};
    goes->compute(1);
    goes->read(goes->launch());
    goes->compute(1);
    gpu.hold(go);
    {
      const HandlePtr handle = goes->launch();  // given to the device, which holds it
      finish(engine, handle);
      gpu.take(handle);
    }
    goes.reset();
    stays.compute(1);
    const HandlePtr behind = stays.launch();
    finish(engine, behind);
    sum_of_ones(engine, "all have given it");
    EXPECT_EQ(FakeNccl::registered(), before + 4) << "both, on either rank";
    sum_of_ones(engine, "all have looked");
    go = true;
    EXPECT_EQ(stays.read(behind), all(kCount, 2));
    for (int step = 0; step < 3; ++step) {
      stays.compute(1);
      EXPECT_EQ(stays.read(stays.launch()), all(kCount, 2));
    }
  });
  EXPECT_EQ(FakeNccl::registered(), before + 2) << "what stays, on either rank";
}

TEST_F(Registered, ASetThatIsRemoved) {
  GpuWorld world(3);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    for (int i = 0; i < 2; ++i) {
      const int32_t set = add_set(engine, {0, 2});
      if (rank != 1) {
        Arena arena(world.ranks, rank, gpu, "bucket", sums(), set);
        arena.compute(1);
        EXPECT_EQ(arena.read(arena.launch()), all(kCount, 2));
      }
      remove_set(engine, set);
    }
  });
}

TEST_F(Registered, RanksThatDifferHearSo) {
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float> values(kCount);
    Arena arena(world.ranks, rank, gpu, "bucket", sums());
    gpu.compute(values, 1);
    arena.compute(1);
    RequestPtr plain = allreduce_of("bucket", values);
    const std::string error = error_of<UsageError>(
        [&] { finish(engine, rank == 0 ? arena.launch() : gpu.submit(engine, plain)); });
    EXPECT_CONTAINS(error, "nccl_register");
  });
}

}  // namespace
}  // namespace bagua
