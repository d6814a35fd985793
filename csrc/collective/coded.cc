#include "collective/coded.h"

#include <algorithm>
#include <cmath>

#include "codec/codec.h"
#include "common/errors.h"
#include "common/scaled.h"
#include "kernel/half.h"

namespace bagua {
namespace {

// Wire bytes that travel at a time, about, unless that were too many messages.
constexpr int64_t kMessageNbytes = scaled(128 << 10);
constexpr int64_t kMostMessages = 256;

}  // namespace

AsFloats::AsFloats(const Jobs& jobs) {
  int64_t short_ones = 0;
  for (const Job* job : jobs) {
    if (job->dtype == DType::kF32) continue;
    if (job->prepare || job->arrived)
      throw InternalError("only floats of 32 bits come in segments");
    short_ones += job->count;
  }
  auto* wide = reinterpret_cast<float*>(
      jobs[0]->scratch.get(Scratch::kWide, static_cast<size_t>(short_ones) * sizeof(float)));
  for (Job* job : jobs) {
    const bool is_short = job->dtype != DType::kF32;
    if (is_short) widen(job->dtype, wide, job->data, job->count);
    all_.push_back({*job, is_short ? wide : reinterpret_cast<float*>(job->data)});
    if (is_short) wide += job->count;
  }
}

void AsFloats::give_back() const {
  for (const Floats& floats : all_)
    if (floats.job.dtype != DType::kF32)
      narrow(floats.job.dtype, floats.job.data, floats.data, floats.job.count);
}

std::vector<Stretch> stretches(const Coding& coding, int64_t begin, int64_t count, int64_t step) {
  if (step == 0) {
    const int64_t tiles = std::max<int64_t>(1, kMessageNbytes / coding.wire_nbytes(kTile));
    step = kTile * std::max(tiles, count / kMostMessages / kTile + 1);
  }
  std::vector<Stretch> all;
  int64_t at = 0;
  for (int64_t done = 0; done < count; done += step) {
    const int64_t n = std::min(step, count - done);
    all.push_back({begin + done, n, at, coding.wire_nbytes(n)});
    at += all.back().nbytes;
  }
  return all;
}

void encode(Job& job, const float* data, float* residual, const Stretch& stretch, char* wire) {
  job.group.touch(static_cast<size_t>(stretch.count * 4 + stretch.nbytes));
  float* lost = residual ? residual + stretch.begin : nullptr;
  job.coding->encode_rest(data + stretch.begin, lost, stretch.count, wire);
}

void add_up(const Job& job, const std::vector<const char*>& said, int64_t count, float* sum) {
  OddSources some;
  job.coding->add_up(said, job.finish, count, sum, &some);
  if (!some.any()) return;
  OddSources odd;
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < said.size(); ++i) {
    job.coding->decode(said[i], count, values.data());
    const bool finite =
        std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
    if (!finite) odd.add(static_cast<int>(i));
  }
  job.note(odd, static_cast<int>(said.size()), &job.group);
}

}  // namespace bagua
