// A bucket in the memory of a device, and what ranks compute there.
#pragma once

#include <functional>
#include <vector>

#include "engine/bucket.h"
#include "engine/program.h"
#include "kernel/half.h"

namespace bagua {

// A bucket of one slot on a device, of floats of 32 or 16 bits, with what its codec keeps.
struct BucketThere {
  BucketThere(LoopbackWorld& world, int rank, Gpu& gpu, const Description& how, int64_t count,
              DType dtype = DType::kF32, int32_t set = 0, int kept = 2)
      : engine(*world.engines[static_cast<size_t>(rank)]),
        gpu(gpu),
        count(count),
        dtype(dtype),
        bucket(world.engines[static_cast<size_t>(rank)], "there", dtype, {count}, how, set,
               /*priority=*/0, kept, &gpu.device, [&gpu](size_t nbytes) {
                 auto memory = gpu.device.allocate(nbytes);
                 gpu.device.clear(memory.get(), nbytes, nullptr);
                 return memory;
               }) {}
  // The device will have computed them.
  void compute(const std::function<float(int64_t)>& value) {
    gpu.device.run(gpu.stream, [=] {
      for (int64_t i = 0; i < count; ++i) {
        if (dtype == DType::kF32) reinterpret_cast<float*>(bucket.data())[i] = value(i);
        if (dtype == DType::kBF16) reinterpret_cast<BF16*>(bucket.data())[i] = to_bf16(value(i));
      }
    });
  }
  HandlePtr launch() { return gpu.launch(bucket); }
  std::vector<float> read(const HandlePtr& handle) {
    finish(engine, handle);
    gpu.take(handle);
    gpu.device.drain(gpu.stream);
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = dtype == DType::kF32 ? reinterpret_cast<float*>(bucket.data())[i]
                                       : to_float(reinterpret_cast<BF16*>(bucket.data())[i]);
    return values;
  }
  std::vector<float> exchange(const std::function<float(int64_t)>& value) {
    compute(value);
    return read(launch());
  }
  std::vector<float> kept(size_t which) const {
    const float* values = bucket.kept()[which].get();
    return std::vector<float>(values, values + count);
  }

  Engine& engine;
  Gpu& gpu;
  const int64_t count;
  const DType dtype;
  Bucket bucket;
};

// What a rank computes in a round: small enough that sums over a node, and what is read of 16 bits,
// are exact.
inline float given_by(int rank, int round, int64_t i) {
  return static_cast<float>((i * 37 + i / 64 * 5 + rank * 101 + round * 11) % 41 - 20);
}

}  // namespace bagua
