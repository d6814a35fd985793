// Who uses a device: values come there only after a while, and are stale until then.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "device/pretend.h"
#include "engine/bucket.h"
#include "engine/fake_nccl.h"
#include "engine/loopback_world.h"

namespace bagua {

constexpr float kStale = -1e30f;

// first, first + slope, ...
inline std::vector<float> line(size_t count, float first, float slope) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = first + slope * static_cast<float>(i);
  return values;
}
inline std::vector<float> all(size_t count, float value) { return line(count, value, 0); }

// A program's stream on a device.
struct Program {
  explicit Program(PretendDevice& device) : device(device), stream(device.add_stream()) {}
  // Values that the device will have computed.
  void compute(std::vector<float>& values, float first, float slope = 0) {
    std::fill(values.begin(), values.end(), kStale);
    device.run(stream, [&values, first, slope] {
      const auto computed = line(values.size(), first, slope);
      std::copy(computed.begin(), computed.end(), values.begin());
    });
  }
  RequestPtr on_device(RequestPtr request) {
    request->device = &device;
    for (Part& part : request->parts) part.on_device = true;
    request->starts = {device.mark(stream)};
    request->handle->began_on(stream);
    return request;
  }
  HandlePtr launch(Bucket& bucket) {
    HandlePtr handle = bucket.launch(Urgency::kNow, {}, nullptr, {device.mark(stream)});
    handle->began_on(stream);
    return handle;
  }
  // Of what is done: as a program that waits for it.
  void take(const HandlePtr& handle) {
    handle->make_follow(stream);
    handle->let_go();
  }
  // What the stream finds after the handle.
  std::vector<float> read(Engine& engine, const HandlePtr& handle,
                          const std::vector<float>& values) {
    finish(engine, handle);
    take(handle);
    std::vector<float> seen;
    device.run(stream, [&] { seen = values; });
    device.drain(stream);
    return seen;
  }
  // What the stream finds after an exchange of values that are still being computed.
  std::vector<float> exchange(Engine& engine, RequestPtr request,
                              const std::vector<float>& values) {
    return read(engine, engine.submit(on_device(std::move(request)), Urgency::kNow), values);
  }
  // The stream stays where it is until `go`.
  void hold(const std::atomic<bool>& go) {
    device.run(stream, [&go] {
      while (!go) std::this_thread::yield();
    });
  }
  PretendDevice& device;
  const Device::Stream stream;
};

struct OwnDevice {
  std::deque<std::vector<float>> memory;  // outlives what runs
  PretendDevice own{/*work_us=*/500};
};

// A rank whose device is its own, as all know.
struct Gpu : OwnDevice, Program {
  explicit Gpu(bool has_nccl = true) : Program(own) {
    if (has_nccl) device.use_nccl(&FakeNccl::library());
  }
  // Values that stay where they are: after an error, others may still read them.
  std::vector<float>& lasting(size_t count) { return memory.emplace_back(count); }
  RequestPtr on_device(RequestPtr request) {
    request->description.on_device = true;
    return Program::on_device(std::move(request));
  }
  HandlePtr submit(Engine& engine, RequestPtr request, Urgency urgency = Urgency::kNow) {
    return engine.submit(on_device(std::move(request)), urgency);
  }
  std::vector<float> exchange(Engine& engine, RequestPtr request,
                              const std::vector<float>& values) {
    return read(engine, submit(engine, std::move(request)), values);
  }
};

// Ranks with a GPU each; all have NCCL, or none has.
struct GpuWorld {
  explicit GpuWorld(int size, bool has_nccl = true, const Config& config = quiet_config())
      : ranks(size, config) {
    add_gpus(has_nccl);
  }
  // On nodes, whose ranks share memory.
  explicit GpuWorld(const NodeOf& node_of) : GpuWorld(node_of, quiet_config(node_of)) {}
  GpuWorld(const NodeOf& node_of, const Config& config) : ranks(node_of, config) {
    add_gpus(/*has_nccl=*/true);
  }
  void add_gpus(bool has_nccl) {
    for (int i = 0; i < ranks.size(); ++i) gpus.push_back(std::make_unique<Gpu>(has_nccl));
  }
  // Calls body(rank, gpu, engine) on every rank.
  template <class Body>
  void run(Body&& body) {
    ranks.run([&](int rank) { body(rank, *gpus[static_cast<size_t>(rank)], ranks[rank]); });
  }
  std::atomic<bool> go{false};             // for who is held; outlives the GPUs
  std::vector<std::unique_ptr<Gpu>> gpus;  // outlive the engines
  LoopbackWorld ranks;
};

// Other ranks have given what `submit(gpu, engine, values)` gives, and one dies before its device
// has come to that: nothing waits for ever, nor on their devices. Of ones it makes `result`.
template <class Submit>
void expect_end_of_what_waits_for(GpuWorld& world, int dies, float result, Submit&& submit) {
  std::atomic<int> under_way{0};
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float>& values = gpu.lasting(5000);
    gpu.compute(values, 1);
    EXPECT_EQ(gpu.read(engine, submit(gpu, engine, values), values), all(values.size(), result));
    if (rank == dies) gpu.hold(world.go);
    const HandlePtr handle = submit(gpu, engine, values);
    finish(engine, handle);
    EXPECT_TRUE(handle->may_fail());
    ++under_way;
    if (rank == dies) {
      while (under_way < world.ranks.size()) std::this_thread::yield();
      gpu.device.fail();
      return world.ranks.die(rank);
    }
    const FailurePtr failure = wait_for_failure(engine);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->kind, ErrorKind::kPeer);
    EXPECT_CONTAINS(failure->what, "rank " + std::to_string(dies));
    handle->make_follow(gpu.stream);
    gpu.device.drain(gpu.stream);
  });
  world.go = true;
}

}  // namespace bagua
