// Exchanges that are captured in a graph of the device, which then does them without the engine.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/bucket.h"
#include "engine/program.h"
#include "kernel/half.h"

namespace bagua {
namespace {

using Graph = std::shared_ptr<PretendDevice::Graph>;

// What `give` gives to the stream, noted instead of done.
template <class Give>
Graph capture(Gpu& gpu, Give&& give) {
  Graph graph = gpu.device.capture(gpu.stream);
  give();
  PretendDevice::end(*graph);
  return graph;
}

// The stream takes up the input, and after the exchange that `submit` starts shows the output.
struct Step {
  std::vector<float> in, out;
  template <class Submit>
  void give(Gpu& gpu, Engine& engine, std::vector<float>& values, Submit&& submit) {
    gpu.device.run(gpu.stream, [this, &values] { values = in; });
    const HandlePtr handle = submit();
    finish(engine, handle);
    gpu.take(handle);
    gpu.device.run(gpu.stream, [this, &values] { out = values; });
  }
};

void expect_usage_error(Engine& engine, const HandlePtr& handle, const std::string& text) {
  try {
    finish(engine, handle);
    ADD_FAILURE() << "no error";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Captured, IsDoneWheneverTheGraphIs) {
  for (const int n : {1, 2, 3}) {
    GpuWorld world(n);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      std::vector<float> values(1000);
      gpu.compute(values, 1);
      gpu.exchange(engine, allreduce_of("x", values), values);

      Step step;
      const auto submit = [&] { return gpu.submit(engine, allreduce_of("x", values)); };
      const Graph graph = capture(gpu, [&] { step.give(gpu, engine, values, submit); });
      EXPECT_TRUE(step.out.empty()) << "it is only captured";
      for (int round = 0; round < 3; ++round) {
        step.in = all(values.size(), static_cast<float>(rank + round));
        gpu.device.replay(gpu.stream, graph);
        gpu.device.drain(gpu.stream);
        const auto sum = static_cast<float>(n * (n - 1) / 2 + n * round);
        EXPECT_EQ(step.out, all(values.size(), sum)) << round;
        std::vector<float> others(1000);  // at once, in between
        gpu.compute(others, 2);
        EXPECT_EQ(gpu.exchange(engine, allreduce_of("x", others), others),
                  all(others.size(), static_cast<float>(2 * n)));
      }
    });
  }
}

// What a codec needs on the way is not used by anybody else, and a bucket's memory stays.
class CapturedBuckets : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Captured, CapturedBuckets,
                         testing::Values("minmax_u8", "topk", "topk:4000"));

TEST_P(CapturedBuckets, KeepTheirMemory) {
  constexpr int64_t kCount = 20'011;
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    Description how;
    how.codec = GetParam();
    const auto shared = world.ranks.engines[static_cast<size_t>(rank)];
    const auto make = [&](const char* name) {
      return std::make_unique<Bucket>(shared, name, DType::kF32, std::vector<int64_t>{kCount}, how,
                                      0, 0, 0, &gpu.device,
                                      [&](size_t nbytes) { return gpu.device.allocate(nbytes); });
    };
    const auto value = [&](int64_t i, int step) {
      return static_cast<float>((i * 37 + step * 11 + rank * 101) % 1000) / 7;
    };
    const auto give = [&](Bucket& bucket, const int& step) {
      auto* data = reinterpret_cast<float*>(bucket.data());
      gpu.device.run(gpu.stream, [=, &step] {
        for (int64_t i = 0; i < kCount; ++i) data[i] = value(i, step);
      });
      const auto handle = gpu.launch(bucket);
      finish(engine, handle);
      gpu.take(handle);
    };
    const auto values_of = [&](const char* data) {
      gpu.device.drain(gpu.stream);
      const auto* values = reinterpret_cast<const float*>(data);
      return std::vector<float>(values, values + kCount);
    };

    const auto at_once = make("at once");
    int step = 0;
    give(*at_once, step);
    auto bucket = make("captured");
    const char* data = bucket->data();
    const Graph graph = capture(gpu, [&] { give(*bucket, step); });
    bucket.reset();
    for (step = 1; step < 4; ++step) {
      give(*at_once, step);
      const auto expected = values_of(at_once->data());
      gpu.device.replay(gpu.stream, graph);
      EXPECT_EQ(values_of(data), expected) << step;
    }
  });
}

TEST(Captured, IsRefusedWhereItCannotBe) {
  for (const bool has_nccl : {true, false}) {
    GpuWorld world(2, has_nccl);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      std::vector<float> values(1000), more(1000);
      const auto refused = [&](const std::string& text, auto&& submit) {
        capture(gpu, [&] { expect_usage_error(engine, submit(), text); });
      };
      const auto x = [&] { return gpu.submit(engine, allreduce_of("x", values)); };
      refused("one exchange before the capture", x);
      gpu.compute(values, 1);
      EXPECT_EQ(gpu.exchange(engine, allreduce_of("x", values), values), all(values.size(), 2));
      if (!has_nccl) refused("takes NCCL on all ranks", x);
      refused("broadcast or reducescatter", [&] {
        RequestPtr gather = request_of(OpKind::kAllgather, "gather");
        add_vector(*gather, values, 10);
        return gpu.submit(engine, gather);
      });
      if (rank == 0) refused("ranks disagree on capture", x);
      if (rank == 1) expect_usage_error(engine, x(), "ranks disagree on capture");
      gpu.compute(values, 2);
      EXPECT_EQ(gpu.exchange(engine, allreduce_of("x", values), values), all(values.size(), 4));
    });
  }
}

// The program asks for nothing, and its device waits for the other's.
TEST(Captured, AReplayEndsWhenAPeerFallsSilent) {
  Config impatient = quiet_config();
  impatient.peer_timeout_s = 0.5;
  GpuWorld world(2, /*has_nccl=*/true, impatient);
  std::atomic<bool> over{false};
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float>& values = gpu.lasting(1000);
    gpu.compute(values, 1);
    gpu.exchange(engine, allreduce_of("x", values), values);
    Step step;
    const auto submit = [&] { return gpu.submit(engine, allreduce_of("x", values)); };
    const Graph graph = capture(gpu, [&] { step.give(gpu, engine, values, submit); });
    step.in = values;
    std::this_thread::sleep_for(std::chrono::milliseconds(1200));  // nobody has anything to do
    if (rank == 1) {
      world.ranks.board.freeze(rank, true);
      while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      world.ranks.board.freeze(rank, false);
    } else {
      gpu.device.replay(gpu.stream, graph);
      const FailurePtr failure = wait_for_failure(engine);
      over = true;
      ASSERT_TRUE(failure);
      EXPECT_CONTAINS(failure->what, "rank 1 (host h1) has not answered");
      gpu.device.drain(gpu.stream);
    }
  });
}

// Nobody is lost, and what NCCL says of its work is all that tells.
TEST(Captured, WhatNcclNoticesInAReplayIsAPeerError) {
  GpuWorld world(2);
  world.run([&](int, Gpu& gpu, Engine& engine) {
    std::vector<float>& values = gpu.lasting(1000);
    gpu.compute(values, 1);
    gpu.exchange(engine, allreduce_of("x", values), values);
    Step step;
    const auto submit = [&] { return gpu.submit(engine, allreduce_of("x", values)); };
    capture(gpu, [&] { step.give(gpu, engine, values, submit); });
    sum_of_ones(engine, "all have captured it");
    FakeNccl::lose_peers_of(2);
    const FailurePtr failure = wait_for_failure(engine);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->kind, ErrorKind::kPeer);
  });
  FakeNccl::lose_peers_of(0);
}

// Its zeros would be given once, and others replay.
TEST(Captured, NotWhileARankHasJoined) {
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float> values(1000);
    gpu.compute(values, 1);
    gpu.exchange(engine, allreduce_of("x", values), values);
    if (rank == 0)
      capture(gpu, [&] {
        expect_usage_error(engine, gpu.submit(engine, allreduce_of("x", values)),
                           "rank 1 has joined, and will not do it again");
      });
    EXPECT_EQ(join(engine), 0);
  });
}

// NCCL would wait for the graph, and the end of a process must not.
TEST(Captured, EndsWithTheProcess) {
  const int before = FakeNccl::finalized();
  {
    GpuWorld world(2);
    world.run([&](int, Gpu& gpu, Engine& engine) {
      std::vector<float> values(100);
      gpu.compute(values, 1);
      gpu.exchange(engine, allreduce_of("x", values), values);
      Step step;
      capture(gpu, [&] {
        step.give(gpu, engine, values,
                  [&] { return gpu.submit(engine, allreduce_of("x", values)); });
      });
    });
  }
  EXPECT_EQ(FakeNccl::finalized(), before);
}

// Two pieces of work of the stream's: NCCL's sum, and what its factor could not do.
TEST(Captured, AveragesShortFloats) {
  GpuWorld world(3);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<BF16> values(1000);
    float in = 0, out = 0;
    const auto give = [&] {
      gpu.device.run(gpu.stream, [&] {
        for (BF16& x : values) x = to_bf16(in);
      });
      RequestPtr request = request_of(OpKind::kAllreduce, "short");
      request->description.op = ReduceOp::kAverage;
      request->description.add_tensor(DType::kBF16, {1000});
      request->parts.push_back(
          {reinterpret_cast<char*>(values.data()), reinterpret_cast<char*>(values.data())});
      const auto handle = gpu.submit(engine, request);
      finish(engine, handle);
      gpu.take(handle);
      gpu.device.run(gpu.stream, [&] { out = to_float(values[999]); });
    };
    give();
    gpu.device.drain(gpu.stream);
    const Graph graph = capture(gpu, give);
    for (const float value : {3.0f, 48.0f}) {
      in = value * static_cast<float>(rank);
      gpu.device.replay(gpu.stream, graph);
      gpu.device.drain(gpu.stream);
      EXPECT_EQ(out, value);
    }
  });
}

// One that is not captured has been seen to before, and goes on with its own work.
TEST(Captured, DrawsNoOtherStreamIn) {
  GpuWorld world(1);
  world.run([&](int, Gpu& gpu, Engine&) {
    Bucket bucket(world.ranks.engines[0], "b", DType::kF32, {10}, {}, 0, 0, 0, &gpu.device,
                  [&](size_t nbytes) { return gpu.device.allocate(nbytes); });
    Program along(gpu.device), other(gpu.device);
    const auto is_captured = [&](Program& program) {
      return gpu.device.captured(gpu.device.mark(program.stream));
    };
    capture(gpu, [&] {
      gpu.device.follow(along.stream, gpu.device.mark(gpu.stream));
      for (Program* program : {&along, &other}) bucket.came_by(program->stream);
      bucket.meet(gpu.stream);
      bucket.part(gpu.stream);
      EXPECT_TRUE(is_captured(along));
      EXPECT_FALSE(is_captured(other));
    });
  });
}

// What is captured does not travel with what is not.
TEST(Captured, BesideOthers) {
  GpuWorld world(2);
  world.run([&](int, Gpu& gpu, Engine& engine) {
    Program other(gpu.device);
    std::vector<float> values(100), theirs(100);
    gpu.compute(values, 1);
    gpu.exchange(engine, allreduce_of("x", values), values);
    Step step;
    HandlePtr at_once;
    const Graph graph = capture(gpu, [&] {
      other.compute(theirs, 1);
      RequestPtr request = other.on_device(allreduce_of("theirs", theirs));
      request->description.on_device = true;
      at_once = engine.submit(request, Urgency::kSoon);
      step.give(gpu, engine, values,
                [&] { return gpu.submit(engine, allreduce_of("x", values), Urgency::kSoon); });
    });
    EXPECT_EQ(other.read(engine, at_once, theirs), all(100, 2));
    step.in = all(100, 3);
    gpu.device.replay(gpu.stream, graph);
    gpu.device.drain(gpu.stream);
    EXPECT_EQ(step.out, all(100, 6));
  });
}

}  // namespace
}  // namespace bagua
