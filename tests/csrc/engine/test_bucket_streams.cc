// Several streams of a program bring values to one bucket, which is exchanged on another one.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "engine/bucket.h"
#include "engine/program.h"

namespace bagua {
namespace {

constexpr int64_t kSlotCount = 100;

std::unique_ptr<Bucket> bucket_of(GpuWorld& world, int rank, Gpu& gpu) {
  return std::make_unique<Bucket>(world.ranks.engines[static_cast<size_t>(rank)], "b", DType::kF32,
                                  std::vector<int64_t>{kSlotCount, kSlotCount}, Description{}, 0, 0,
                                  0, &gpu.device,
                                  [&](size_t nbytes) { return gpu.device.allocate(nbytes); });
}

// What a stream finds at the place of a slot.
float seen_by(Program& program, const Bucket& bucket, size_t slot) {
  const auto* data = reinterpret_cast<const float*>(bucket.data()) + bucket.begins()[slot];
  float seen = -1;
  program.device.run(program.stream, [&] { seen = data[kSlotCount - 1]; });
  program.device.drain(program.stream);
  return seen;
}

TEST(BucketStreams, ValuesAreThereWhereverTheyCameFrom) {
  for (const bool has_nccl : {true, false}) {
    GpuWorld world(2, has_nccl);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      const auto bucket = bucket_of(world, rank, gpu);
      Program side(gpu.device);
      std::atomic<bool> go{false};
      for (Program* program : {static_cast<Program*>(&gpu), &side}) {
        const size_t slot = program == &side;
        auto* data = reinterpret_cast<float*>(bucket->data()) + bucket->begins()[slot];
        if (slot == 1) side.hold(go);  // it is far behind
        gpu.device.run(program->stream, [=] { std::fill_n(data, kSlotCount, slot + 1.0f); });
        bucket->came_by(program->stream);
      }
      bucket->meet(gpu.stream);
      bucket->part(gpu.stream);
      const auto handle = gpu.launch(*bucket);
      go = true;
      finish(engine, handle);
      gpu.take(handle);
      EXPECT_EQ(seen_by(gpu, *bucket, 0), 2);
      EXPECT_EQ(seen_by(gpu, *bucket, 1), 4);
    });
  }
}

// Whose memory a gradient's may be again.
TEST(BucketStreams, WhoBroughtValuesGoesOnWhenTheyHaveBeenGathered) {
  GpuWorld world(1);
  world.run([&](int rank, Gpu& gpu, Engine&) {
    const auto bucket = bucket_of(world, rank, gpu);
    Program side(gpu.device);
    std::atomic<bool> go{false}, gathered{false}, late{false};
    for (Program* program : {static_cast<Program*>(&gpu), &side}) bucket->came_by(program->stream);
    bucket->meet(gpu.stream);
    gpu.hold(go);
    gpu.device.run(gpu.stream, [&] { gathered = true; });
    bucket->part(gpu.stream);
    gpu.device.run(side.stream, [&] { late = gathered.load(); });
    go = true;
    gpu.device.drain(side.stream);
    EXPECT_TRUE(late);
  });
}

// The stream that gave what is exchanged owns its memory, whichever takes up the results.
TEST(BucketStreams, WhereItBeganAResultIsFollowedToo) {
  for (const bool elsewhere : {true, false}) {
    GpuWorld world(1);
    world.run([&](int, Gpu& gpu, Engine& engine) {
      Program side(gpu.device);
      std::vector<float> values(kSlotCount);
      gpu.compute(values, 1);
      RequestPtr request = allreduce_of("x", values);
      request->description.postscale = 3;
      request->keepalive = std::make_shared<int>();
      const auto handle = gpu.submit(engine, request);
      handle->began_on(gpu.stream);
      finish(engine, handle);
      handle->make_follow(elsewhere ? side.stream : gpu.stream);
      handle->let_go();
      float seen = 0;
      gpu.device.run(gpu.stream, [&] { seen = values[kSlotCount - 1]; });
      gpu.device.drain(gpu.stream);
      EXPECT_EQ(seen, 3) << elsewhere;
      if (elsewhere) gpu.device.drain(side.stream);
    });
  }
}

}  // namespace
}  // namespace bagua
