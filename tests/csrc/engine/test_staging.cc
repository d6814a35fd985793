// Tensors on a device that takes its time: nothing may be read before it is there, or written
// before it was read.
#include "engine/staging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "engine/bucket.h"
#include "engine/program.h"

namespace bagua {
namespace {

constexpr int kWorkUs = 2000;

TEST(Staging, SumsWhatADeviceHasYetToCompute) {
  for (const int n : {1, 2, 3})
    for (const size_t count : {1, 1000, 300'000, 1'000'000}) {
      PretendDevice device(kWorkUs);
      LoopbackWorld world(n);
      world.run([&](int rank) {
        Program program(device);
        std::vector<float> values(count);
        for (int step = 0; step < 3; ++step) {
          program.compute(values, static_cast<float>(rank + step), 1);
          const auto handle =
              world[rank].submit(program.on_device(allreduce_of("x", values)), Urgency::kWaited);
          const float ranks = static_cast<float>(n * (n - 1)) / 2;
          EXPECT_EQ(program.read(world[rank], handle, values),
                    line(count, ranks + static_cast<float>(n * step), static_cast<float>(n)));
        }
      });
    }
}

TEST(Staging, ExchangesGoOnWithoutTheHostWaitingForTheDevice) {
  PretendDevice device(kWorkUs);
  LoopbackWorld world(2);
  world.run([&](int rank) {
    Program program(device);
    std::vector<std::vector<float>> values(6, std::vector<float>(50'000));
    std::vector<HandlePtr> handles;
    for (size_t i = 0; i < values.size(); ++i) {
      program.compute(values[i], static_cast<float>(i), 1);
      handles.push_back(world[rank].submit(
          program.on_device(allreduce_of("x" + std::to_string(i), values[i])), Urgency::kNow));
    }
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_EQ(program.read(world[rank], handles[i], values[i]),
                line(values[i].size(), 2 * static_cast<float>(i), 2));
  });
}

// Memory of the host that nothing is brought to is written again when what was in it has left, even
// if that is behind a stream that lags.
TEST(Staging, ResultsStayUntilALaggingStreamHasThem) {
  PretendDevice device(kWorkUs);
  LoopbackWorld world(2);
  std::atomic<bool> go{false};
  world.run([&](int rank) {
    Program program(device);
    std::vector<std::vector<float>> values(3, std::vector<float>(50'000));
    std::vector<HandlePtr> handles;
    if (rank == 1) program.hold(go);
    for (size_t i = 0; i < values.size(); ++i) {
      if (rank == 0) values[i] = line(values[i].size(), static_cast<float>(i), 1);
      const RequestPtr request = request_of(OpKind::kBroadcast, "x" + std::to_string(i));
      request->description.root = 0;
      add_vector(*request, values[i]);
      handles.push_back(world[rank].submit(program.on_device(request), Urgency::kNow));
      finish(world[rank], handles.back());
    }
    if (rank == 0) {
      // By then the other one has the last, too.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      go = true;
    }
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_EQ(program.read(world[rank], handles[i], values[i]),
                line(values[i].size(), static_cast<float>(i), 1));
  });
}

TEST(Staging, OnlySomeRanksHaveADevice) {
  PretendDevice device(kWorkUs);
  LoopbackWorld world(3);
  world.run([&](int rank) {
    Program program(device);
    std::vector<float> values(70'000);
    program.compute(values, static_cast<float>(rank), 1);
    if (rank == 1) {
      device.drain(program.stream);
      call(world[rank], allreduce_of("x", values));
      EXPECT_EQ(values, line(values.size(), 3, 3));
    } else {
      EXPECT_EQ(program.exchange(world[rank], allreduce_of("x", values), values),
                line(values.size(), 3, 3));
    }
  });
}

// Of one request some tensors travel by themselves, and the others together: on all ranks alike.
TEST(Staging, OnlySomeRanksHaveSomeOnADevice) {
  PretendDevice device(kWorkUs);
  LoopbackWorld world(3);
  world.run([&](int rank) {
    Program program(device);
    std::vector<float> large(200'000), some(90'000, static_cast<float>(rank)), others = some;
    program.compute(large, static_cast<float>(rank), 1);
    if (rank == 1) device.drain(program.stream);
    RequestPtr request = allreduce_of("x", large);
    add_vector(*request, some);
    add_vector(*request, others);
    if (rank != 1) {
      request->device = &device;
      request->parts[0].on_device = true;
      request->starts = {device.mark(program.stream)};
    }
    const HandlePtr handle = world[rank].submit(std::move(request), Urgency::kNow);
    if (rank == 1) finish(world[rank], handle);
    EXPECT_EQ(rank == 1 ? large : program.read(world[rank], handle, large),
              line(large.size(), 3, 3));
    EXPECT_EQ(some, all(some.size(), 3));
    EXPECT_EQ(others, all(others.size(), 3));
  });
}

TEST(Staging, ReadsAllBeforeItWritesAny) {
  PretendDevice device(kWorkUs);
  LoopbackWorld world(2);
  world.run([&](int rank) {
    Program program(device);
    std::vector<float> values(400'000);
    program.compute(values, 0, 1);
    // A tensor, its half, and the tensor again.
    RequestPtr request = allreduce_of("x", values);
    request->description.codec = "raw";  // each travels by itself
    std::vector<float> half(200'000);
    add_vector(*request, half);
    request->parts[1] = request->parts[0];
    add_vector(*request, values);
    EXPECT_EQ(program.exchange(world[rank], request, values), line(values.size(), 0, 2));
  });
}

// What the program's stream finds in a result that the engine has made room for, on the device.
std::vector<float> output_of(Program& program, Engine& engine, const HandlePtr& handle,
                             size_t count, size_t index = 0) {
  finish(engine, handle);
  EXPECT_EQ(handle->device(), &program.device);
  const Output& output = handle->outputs.at(index);
  EXPECT_TRUE(output.on_device);
  program.take(handle);
  std::vector<float> seen;
  program.device.run(program.stream, [&, from = reinterpret_cast<float*>(output.data.get())] {
    seen.assign(from, from + count);
  });
  program.device.drain(program.stream);
  return seen;
}

TEST(Staging, MovesRowsAndSlices) {
  PretendDevice device(kWorkUs);
  LoopbackWorld world(3);
  world.run([&](int rank) {
    Program program(device);
    const float first = static_cast<float>(100 * rank);

    std::vector<float> values(12);
    program.compute(values, first, 1);
    RequestPtr gather = request_of(OpKind::kAllgather, "g");
    add_vector(*gather, values, 4);
    gather->parts[0].out = nullptr;
    HandlePtr handle = world[rank].submit(program.on_device(gather), Urgency::kNow);
    const std::vector<float> rows = output_of(program, world[rank], handle, 36);
    for (size_t i = 0; i < 36; ++i) EXPECT_EQ(rows[i], static_cast<float>(100 * (i / 12) + i % 12));

    program.compute(values, first, 1);
    RequestPtr swap = request_of(OpKind::kAlltoall, "a");
    add_vector(*swap, values, 4);
    swap->parts[0].out = nullptr;
    swap->splits = {2, 1, 1};
    handle = world[rank].submit(program.on_device(swap), Urgency::kNow);
    const size_t count = rank == 0 ? 6 : 3,
                 skipped = rank == 0 ? 0 : 3 + 3 * static_cast<size_t>(rank);
    const std::vector<float> received = output_of(program, world[rank], handle, 3 * count);
    for (size_t i = 0; i < 3 * count; ++i)
      EXPECT_EQ(received[i], static_cast<float>(100 * (i / count) + skipped + i % count));

    program.compute(values, first, 1);
    RequestPtr broadcast = request_of(OpKind::kBroadcast, "b");
    broadcast->description.root = 2;
    add_vector(*broadcast, values);
    EXPECT_EQ(program.exchange(world[rank], broadcast, values), line(12, 200, 1));

    program.compute(values, first, 1);
    std::vector<float> slice(rank == 0 ? 6 : 3, kStale);
    RequestPtr scatter = request_of(OpKind::kReducescatter, "s");
    add_vector(*scatter, values, 4);
    scatter->parts[0].out = reinterpret_cast<char*>(slice.data());
    const float begin = rank == 0 ? 0.0f : static_cast<float>(3 + 3 * rank);
    EXPECT_EQ(program.exchange(world[rank], scatter, slice),
              line(slice.size(), 300 + 3 * begin, 3));
  });
}

// Each where its tensor is; and again, when they are larger and what has been made room for is
// still on its way.
TEST(Staging, GathersWhereTheTensorsAre) {
  PretendDevice device(kWorkUs);
  LoopbackWorld world(2);
  world.run([&](int rank) {
    Program program(device);
    std::vector<HandlePtr> handles;
    std::vector<std::vector<float>> given(3 * 4);
    const auto count_of = [](int step, int i) {
      return static_cast<size_t>(1000 * (i + 2 * step));
    };
    for (int step = 0; step < 4; ++step) {
      RequestPtr gather = request_of(OpKind::kAllgather, "g" + std::to_string(step));
      for (int i = 0; i < 3; ++i) {
        auto& values = given[static_cast<size_t>(3 * step + i)] =
            std::vector<float>(count_of(step, i));
        if (i != 1) program.compute(values, static_cast<float>(rank + step));
        if (i == 1) std::fill(values.begin(), values.end(), static_cast<float>(rank + step));
        add_vector(*gather, values, static_cast<int64_t>(values.size()));
        gather->parts.back().out = nullptr;
      }
      gather = program.on_device(gather);
      gather->parts[1].on_device = false;
      handles.push_back(world[rank].submit(std::move(gather), Urgency::kNow));
    }
    for (int step = 0; step < 4; ++step) {
      const HandlePtr& handle = handles[static_cast<size_t>(step)];
      for (int i = 0; i < 3; ++i) {
        const size_t count = count_of(step, i);
        std::vector<float> expected = all(count, static_cast<float>(step));
        expected.resize(2 * count, static_cast<float>(step + 1));
        if (i != 1) {
          EXPECT_EQ(output_of(program, world[rank], handle, 2 * count, static_cast<size_t>(i)),
                    expected);
          continue;
        }
        finish(world[rank], handle);
        EXPECT_FALSE(handle->outputs.at(1).on_device);
        const auto* values = reinterpret_cast<const float*>(handle->outputs.at(1).data.get());
        EXPECT_EQ(std::vector<float>(values, values + 2 * count), expected);
      }
    }
  });
}

TEST(Staging, ABucketsArenaIsOnTheDevice) {
  for (const char* codec : {"", "minmax_u8"}) {
    PretendDevice device(kWorkUs);
    LoopbackWorld world(2);
    world.run([&](int rank) {
      Program program(device);
      std::vector<float> arena;
      const auto allocate = [&](size_t nbytes) {
        arena.resize(nbytes / 4);
        return std::shared_ptr<char>(reinterpret_cast<char*>(arena.data()), [](char*) {});
      };
      Description exchange;
      exchange.codec = codec;
      Bucket bucket(world.engines[static_cast<size_t>(rank)], "b", DType::kF32, {300'000, 16, 7},
                    exchange, 0, 0, 0, &device, allocate);
      EXPECT_EQ(bucket.large(), std::vector<bool>(3, false));
      for (int step = 0; step < 3; ++step) {
        std::fill(arena.begin(), arena.end(), kStale);
        device.run(program.stream, [&arena, step] {
          std::fill(arena.begin(), arena.end(), static_cast<float>(step));
        });
        const auto handle = program.launch(bucket);
        EXPECT_EQ(program.read(world[rank], handle, arena),
                  std::vector<float>(arena.size(), static_cast<float>(2 * step)));
      }
    });
  }
}

// The one after the next comes to memory that is left by many results, one after the other.
TEST(Staging, NothingComesToMemoryThatResultsHaveYetToLeave) {
  constexpr size_t kTensors = 10, kCount = 3000;
  PretendDevice device(/*work_us=*/5000);
  LoopbackWorld world(2);
  world.run([&](int rank) {
    Program program(device);
    std::vector<std::vector<float>> told(kTensors, std::vector<float>(kCount));
    RequestPtr broadcast = request_of(OpKind::kBroadcast, "told");
    broadcast->description.root = 0;
    for (size_t i = 0; i < kTensors; ++i) {
      program.compute(told[i], rank == 0 ? static_cast<float>(i) : kStale);
      add_vector(*broadcast, told[i]);
    }
    std::vector<float> next(kCount), after(kTensors * kCount);
    program.compute(next, 1);
    program.compute(after, 1);
    device.drain(program.stream);
    std::vector<HandlePtr> handles;
    const auto exchange = [&](RequestPtr request) {
      handles.push_back(world[rank].submit(program.on_device(std::move(request)), Urgency::kNow));
      finish(world[rank], handles.back());
    };
    exchange(broadcast);
    exchange(allreduce_of("next", next));
    exchange(allreduce_of("after", after));
    for (const HandlePtr& handle : handles) program.take(handle);
    device.drain(program.stream);
    for (size_t i = 0; i < kTensors; ++i) EXPECT_EQ(told[i], all(kCount, static_cast<float>(i)));
    EXPECT_EQ(next, all(kCount, 2));
    EXPECT_EQ(after, all(kTensors * kCount, 2));
  });
}

TEST(Staging, MemoryStaysWhileResultsAreOnTheirWay) {
  PretendDevice device(kWorkUs);
  LoopbackWorld world(2);
  world.run([&](int rank) {
    Program program(device);
    for (int step = 0; step < 5; ++step) {
      auto values = std::make_shared<std::vector<float>>(30'000);
      std::weak_ptr<std::vector<float>> memory = values;
      RequestPtr request = program.on_device(allreduce_of("x", *values));
      request->keepalive = std::move(values);
      HandlePtr handle = world[rank].submit(std::move(request), Urgency::kWaited);
      finish(world[rank], handle);
      EXPECT_FALSE(memory.expired()) << "though nobody else has it";
      if (step % 2 == 0) {
        handle->make_follow(program.stream);
        device.drain(program.stream);  // as if the memory were its own, and reused in its order
        handle->let_go();
        EXPECT_TRUE(memory.expired());
      } else {
        handle.reset();
        // Soon: the engine may be about to let go.
        const double late_s = now_s() + kHangS;
        while (!memory.expired() && now_s() < late_s) device.let_go();
        EXPECT_TRUE(memory.expired());
      }
    }
  });
}

TEST(Staging, MixedRequestsAndLoneHostTensors) {
  PretendDevice device(kWorkUs);
  LoopbackWorld world(2);
  world.run([&](int rank) {
    Program program(device);
    for (const size_t count : {10, 200'000}) {
      std::vector<float> here(count, 1), there(count);
      // One request of both kinds, whose host tensors overlap.
      RequestPtr mixed = allreduce_of("m" + std::to_string(count), here);
      add_vector(*mixed, here);
      program.compute(there, static_cast<float>(rank), 1);
      add_vector(*mixed, there);
      mixed->device = &device;
      mixed->parts[2].on_device = true;
      mixed->starts = {device.mark(program.stream)};
      auto handle = world[rank].submit(mixed, Urgency::kNow);
      EXPECT_EQ(program.read(world[rank], handle, there), line(count, 1, 2));
      EXPECT_EQ(here, std::vector<float>(count, 2));
      // Two requests that may be agreed together.
      program.compute(there, 5, 1);
      const auto first = world[rank].submit(
          program.on_device(allreduce_of("d" + std::to_string(count), there)), Urgency::kSoon);
      const auto second =
          world[rank].submit(allreduce_of("h" + std::to_string(count), here), Urgency::kSoon);
      EXPECT_EQ(program.read(world[rank], first, there), line(count, 10, 2));
      finish(world[rank], second);
      EXPECT_EQ(here, std::vector<float>(count, 4));
    }
  });
}

TEST(Staging, ABrokenDeviceIsAnErrorAndNoHang) {
  LoopbackWorld world(2);
  std::vector<std::unique_ptr<PretendDevice>> devices;
  for (int rank = 0; rank < 2; ++rank) devices.push_back(std::make_unique<PretendDevice>(kWorkUs));
  world.run([&](int rank) {
    PretendDevice& device = *devices[static_cast<size_t>(rank)];
    Program program(device);
    auto values = std::make_shared<std::vector<float>>(3'000'000);
    program.compute(*values, 1, 1);
    device.drain(program.stream);
    RequestPtr request = program.on_device(allreduce_of("x", *values));
    request->keepalive = values;
    if (rank == 1) device.fail();
    const std::string text = error_of<Error>(
        [&] { finish(world[rank], world[rank].submit(std::move(request), Urgency::kWaited)); });
    EXPECT_CONTAINS(text, "broken");
    if (rank == 1) world.die(rank);
  });
}

// As when a kernel hangs that the caller's stream has been given before.
TEST(Staging, AResultThatCannotArriveHoldsUpNoFailure) {
  PretendDevice device(0);
  std::atomic<bool> goes_on{false};
  std::atomic<int> through{0};  // the broadcast
  std::thread rescue([&] {      // a failure that waits for it fails the test, and does not hang it
    for (const double late_s = now_s() + 15; !goes_on && now_s() < late_s;)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    goes_on = true;
  });
  LoopbackWorld world(3);
  world.run([&](int rank) {
    Program program(device);
    auto values = std::make_shared<std::vector<float>>(1000, static_cast<float>(rank));
    if (rank == 0)
      device.run(program.stream, [&] {
        while (!goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
    RequestPtr broadcast = request_of(OpKind::kBroadcast, "b");
    broadcast->description.root = 2;
    add_vector(*broadcast, *values);
    broadcast->keepalive = values;
    const auto handle = world[rank].submit(program.on_device(broadcast), Urgency::kWaited);
    finish(world[rank], handle);
    ++through;
    while (through < 3) std::this_thread::yield();
    if (rank == 1) return world.die(rank);
    RequestPtr sum = allreduce_of("x", *values);
    EXPECT_CONTAINS(error_of<PeerError>(
                        [&] { finish(world[rank], world[rank].submit(sum, Urgency::kWaited)); }),
                    "rank 1");
    if (rank != 0) return;
    EXPECT_FALSE(goes_on) << "it has waited for the device";
    goes_on = true;
    device.drain_all();  // what could not arrive does now
  });
  goes_on = true;
  rescue.join();
}

TEST(Staging, ARankThatDiesLeavesNoResultUnderWay) {
  PretendDevice device(kWorkUs);
  LoopbackWorld world(3);
  world.run([&](int rank) {
    Program program(device);
    if (rank == 1) return world.die(rank);
    auto values = std::make_shared<std::vector<float>>(2'000'000);
    program.compute(*values, 1, 1);
    RequestPtr request = program.on_device(allreduce_of("x", *values));
    request->keepalive = values;
    EXPECT_CONTAINS(error_of<PeerError>([&] {
                      finish(world[rank], world[rank].submit(request, Urgency::kWaited));
                    }),
                    "rank 1");
    device.drain(program.stream);
    values.reset();  // and nobody reads or writes what is gone
  });
}

}  // namespace
}  // namespace bagua
