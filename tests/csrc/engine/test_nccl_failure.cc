// What is under way on devices when nobody waits for it, when a rank dies, a device or NCCL fails.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "engine/nccl_exchange.h"
#include "engine/program.h"
#include "transport/nccl.h"

namespace bagua {
namespace {

void exchange_once(GpuWorld& world) {
  world.run([&](int, Gpu& gpu, Engine& engine) {
    std::vector<float>& values = gpu.lasting(1000);
    gpu.compute(values, 1);
    gpu.exchange(engine, allreduce_of("x", values), values);
  });
}

TEST(NcclFailure, MemoryOfWhatNobodyWaitsForStays) {
  GpuWorld world(2);
  world.run([&](int, Gpu& gpu, Engine& engine) {
    std::atomic<bool> go{false};
    gpu.hold(go);
    auto values = std::make_shared<std::vector<float>>(1000, 1.0f);
    const std::weak_ptr<std::vector<float>> memory = values;
    RequestPtr request = gpu.on_device(allreduce_of("x", *values));
    request->keepalive = std::move(values);
    finish(engine, engine.submit(std::move(request), Urgency::kWaited));
    std::vector<float> other(1, 1);
    call(engine, allreduce_of("y", other));  // the engine goes on meanwhile
    gpu.device.let_go();
    EXPECT_FALSE(memory.expired());
    go = true;
    const double late_s = now_s() + kHangS;
    while (!memory.expired() && now_s() < late_s) gpu.device.let_go();
    EXPECT_TRUE(memory.expired());
  });
}

TEST(NcclFailure, AResultThatNobodyWantsMayStillCome) {
  GpuWorld world(2);
  world.run([&](int, Gpu& gpu, Engine& engine) {
    for (int i = 0; i < 20; ++i) {
      auto given = std::make_shared<std::vector<float>>(1000);
      gpu.compute(*given, 1);
      RequestPtr gather = request_of(OpKind::kAllgather, "gather");
      add_vector(*gather, *given, 10);
      gather->keepalive = std::move(given);
      finish(engine, gpu.submit(engine, gather));
      gather.reset();
    }
  });
}

TEST(NcclFailure, ADeadPeerEndsWhatIsUnderWay) {
  GpuWorld world(3);
  expect_end_of_what_waits_for(world, 1, 3, [](Gpu& gpu, Engine& engine, auto& values) {
    return gpu.submit(engine, allreduce_of("x", values), Urgency::kWaited);
  });
}

// Who leaves still gets its own results, and others theirs.
TEST(NcclFailure, WhoLeavesWaitsForWhatIsUnderWay) {
  std::atomic<bool> go{false};
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float>& values = gpu.lasting(1000);
    gpu.compute(values, 1);
    if (rank == 0) gpu.hold(go);  // far behind
    const auto handle = gpu.submit(engine, allreduce_of("x", values));
    finish(engine, handle);
    gpu.take(handle);
    if (rank == 0) return;
    engine.stop();
    EXPECT_FALSE(engine.wait_stopped(1));
    go = true;
    EXPECT_TRUE(engine.wait_stopped(kHangS));
    EXPECT_FALSE(engine.failure());
    gpu.device.drain(gpu.stream);
    EXPECT_EQ(values, all(values.size(), 2));
  });
}

TEST(NcclFailure, WhoLeavesWaitsNoLongerThanItIsTold) {
  Config config = quiet_config();
  config.stall_fail_s = 0.5;
  std::atomic<bool> go{false};
  GpuWorld world(2, /*has_nccl=*/true, config);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float>& values = gpu.lasting(1000);
    gpu.compute(values, 1);
    if (rank == 0) gpu.hold(go);
    finish(engine, gpu.submit(engine, allreduce_of("x", values)));
    if (rank == 0) return;
    engine.stop();
    EXPECT_TRUE(engine.wait_stopped(kHangS));
    ASSERT_TRUE(engine.failure());
    EXPECT_CONTAINS(engine.failure()->what, "(stall_fail_s)");
    go = true;
  });
  go = true;
}

// Behind it are threads that call NCCL, and after it the process may end.
TEST(NcclFailure, WhoHasStoppedIsThroughWithNccl) {
  GpuWorld world(2);
  exchange_once(world);
  std::vector<float> never(10);
  const HandlePtr open = world.ranks[1].submit(allreduce_of("never", never), Urgency::kNow);
  FakeNccl::hang_aborts(true);
  for (auto& engine : world.ranks.engines) engine->stop();
  EXPECT_FALSE(world.ranks[1].wait_stopped(0.5));
  FakeNccl::hang_aborts(false);
  world.ranks.stop();
  EXPECT_EQ(FakeNccl::under_abort(), 0);
  EXPECT_TRUE(open->failure());
}

TEST(NcclFailure, AnErrorOfNcclLeavesNoGroupOpen) {
  GpuWorld world(2);
  FakeNccl::fail_next();
  world.run([&](int, Gpu& gpu, Engine& engine) {
    std::vector<float>& values = gpu.lasting(1000);
    gpu.compute(values, 1);
    const std::string text = error_of<PeerError>([&] {
      for (;;) call(engine, gpu.on_device(allreduce_of("x", values)));
    });
    EXPECT_CONTAINS(text, "a fake error");
    EXPECT_EQ(FakeNccl::depth(), 0);
  });
}

// Kernels of one communicator may be queued behind those of another.
TEST(NcclFailure, CommunicatorsAreAbortedAtOnce) {
  for (const bool fails : {true, false}) {
    {
      GpuWorld world(2);
      FakeNccl::abort_together(2);
      world.run([&](int rank, Gpu& gpu, Engine& engine) {
        std::vector<float>& values = gpu.lasting(1000);
        const int32_t sets[] = {add_set(engine, {0}), add_set(engine, {1})};
        for (const int32_t set : {0, sets[rank]}) {
          gpu.compute(values, 1);
          RequestPtr request = allreduce_of("x", values, ReduceOp::kSum, set);
          request->description.prescale = 0.5;  // which takes a communicator for a rank alone, too
          gpu.exchange(engine, std::move(request), values);
        }
      });
      if (fails) {
        FakeNccl::fail_next();  // now that nobody is in an exchange of its own
        world.run([&](int, Gpu& gpu, Engine& engine) {
          std::vector<float>& values = gpu.lasting(1000);
          error_of<PeerError>([&] {
            for (;;) call(engine, gpu.on_device(allreduce_of("x", values)));
          });
        });
      }
    }
    EXPECT_TRUE(FakeNccl::aborted_together()) << (fails ? "after an error" : "at the end");
    FakeNccl::abort_together(0);
  }
}

// It is known to, where it waits for its own threads or for another library's kernels.
TEST(NcclFailure, AnAbortThatHangsKeepsNobodyWaiting) {
  FakeNccl::hang_aborts(true);
  {
    GpuWorld world(2);
    exchange_once(world);
    FakeNccl::fail_next();
    world.run([&](int, Gpu& gpu, Engine& engine) {
      std::vector<float>& values = gpu.lasting(1000);
      const std::string text = error_of<PeerError>([&] {
        for (;;) call(engine, gpu.on_device(allreduce_of("x", values)));
      });
      EXPECT_CONTAINS(text, "a fake error");
    });
  }
  FakeNccl::hang_aborts(false);
}

// Nor is any destroyed then, for which NCCL may wait for the other ranks.
TEST(NcclFailure, AnEndThatDoesNotComeIsAborted) {
  const int aborted = FakeNccl::aborted(), destroyed = FakeNccl::destroyed();
  for (const bool never : {true, false}) {
    FakeNccl::hold_finalized(never);
    GpuWorld world(2);
    exchange_once(world);
  }
  EXPECT_EQ(FakeNccl::aborted(), aborted + 4);
  EXPECT_EQ(FakeNccl::destroyed(), destroyed);
}

// The thread that begins it writes down the communicator in the end: a sanitizer would tell.
TEST(NcclFailure, WhatIsGivenUpWhileItBeginsMayEndLater) {
  FakeNccl::hang_aborts(true);
  PretendDevice device(/*work_us=*/0);
  auto group = std::make_unique<NcclGroup>(FakeNccl::library(), device, /*size=*/2, /*me=*/0,
                                           [](const std::function<bool()>&) {});
  NcclId id;
  FakeNccl::library().get_unique_id(&id);
  group->begin(id);  // and nobody else does
  group.reset();
  EXPECT_GT(FakeNccl::under_abort(), 0);
  FakeNccl::hang_aborts(false);
  const double late_s = now_s() + kHangS;
  while (FakeNccl::under_abort() > 0 && now_s() < late_s) std::this_thread::yield();
  EXPECT_EQ(FakeNccl::under_abort(), 0);
}

// It calls a dead peer and a broken network by several names; alone there is nobody to blame.
TEST(NcclFailure, WhatNcclSaysOfOthersIsAPeerError) {
  const auto cuda_error = static_cast<NcclResult>(1);
  for (const int n : {1, 2})
    for (const NcclResult how : {NcclResult::kRemoteError, NcclResult::kSystemError,
                                 NcclResult::kInternalError, cuda_error}) {
      GpuWorld world(n);
      FakeNccl::fail_next(how);
      world.run([&](int, Gpu& gpu, Engine& engine) {
        std::vector<float>& values = gpu.lasting(1000);
        ErrorKind kind = ErrorKind::kUsage;
        std::string text;
        try {
          for (;;) {
            RequestPtr request = allreduce_of("x", values);
            request->description.prescale = 0.5;  // or a rank alone would have nothing to do
            call(engine, gpu.on_device(std::move(request)));
          }
        } catch (const Error& error) {
          kind = error.kind();
          text = error.what();
        }
        EXPECT_CONTAINS(text, "NCCL_DEBUG=WARN");
        EXPECT_CONTAINS(text, "nccl=False");
        // Who is told of another rank's own error hears of a peer.
        if (n == 1 || how != cuda_error) {
          EXPECT_EQ(kind, n == 1 ? ErrorKind::kInternal : ErrorKind::kPeer);
        } else {
          EXPECT_EQ(text.find("network"), std::string::npos);
        }
      });
    }
}

// As where NCCL finds no network on one of them: the others must not wait for it, and all go by the
// host from then on.
TEST(NcclFailure, WhereItDoesNotBeginOnOneRankNoneUsesIt) {
  for (const int n : {1, 2, 3})
    for (int broken = 0; broken < n; ++broken)
      for (const auto says : {FakeNccl::Says::kAtOnce, FakeNccl::Says::kLater}) {
        const int before = FakeNccl::calls();
        FakeNccl::break_on(broken, says);
        GpuWorld world(n);
        world.run([&](int, Gpu& gpu, Engine& engine) {
          std::vector<float>& values = gpu.lasting(1000);
          for (int step = 0; step < 3; ++step) {
            gpu.compute(values, 1);
            EXPECT_EQ(gpu.exchange(engine, allreduce_of("x", values), values),
                      all(values.size(), static_cast<float>(n)));
          }
        });
        EXPECT_EQ(FakeNccl::calls(), before) << "rank " << broken << " of " << n;
        FakeNccl::break_on(-1);
      }
}

TEST(NcclFailure, ADeadPeerEndsTheBeginning) {
  FakeNccl::break_on(1, FakeNccl::Says::kNever);
  GpuWorld world(3);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float>& values = gpu.lasting(1000);
    const auto handle = gpu.submit(engine, allreduce_of("x", values));
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // its engine is in the middle
      return world.ranks.die(rank);
    }
    EXPECT_CONTAINS(error_of<PeerError>([&] { finish(engine, handle); }), "rank 1");
  });
  FakeNccl::break_on(-1);
}

TEST(NcclFailure, ABrokenDeviceIsAnErrorAndNoHang) {
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float>& values = gpu.lasting(1000);
    gpu.compute(values, 1);
    gpu.exchange(engine, allreduce_of("x", values), values);
    // In the order of submission, so that both have had theirs.
    std::vector<float> other(1, 1);
    call(engine, allreduce_of("y", other));
    RequestPtr request = gpu.on_device(allreduce_of("x", values));
    if (rank == 1) gpu.device.fail();
    std::string text;
    try {
      for (int i = 0;; ++i) call(engine, i == 0 ? request : allreduce_of("y", other));
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_CONTAINS(text, "broken");
  });
}

// Nobody waits for a device on the host, so nobody would notice.
TEST(NcclFailure, WhatNeverEndsIsToldAfterAWhile) {
  Config config = quiet_config();
  config.stall_fail_s = 1;
  GpuWorld world(2, /*has_nccl=*/true, config);
  std::atomic<bool> go{false};
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float>& values = gpu.lasting(1000);
    gpu.compute(values, 1);
    gpu.exchange(engine, allreduce_of("x", values), values);
    if (rank == 1) gpu.hold(go);
    finish(engine, gpu.submit(engine, allreduce_of("x", values)));
    const FailurePtr failure = wait_for_failure(engine);
    ASSERT_TRUE(failure);
    EXPECT_CONTAINS(failure->what, "not done although all ranks answer");
    go = true;
  });
}

}  // namespace
}  // namespace bagua
