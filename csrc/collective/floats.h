// What travels through a codec is floats of 32 bits, whatever the job's elements are.
#pragma once

#include "collective/collective.h"
#include "common/errors.h"
#include "kernel/half.h"

namespace bagua {

inline bool float_like(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// Calls run(job, data) with the job's elements as floats, in place.
inline void on_floats(Job& job, void (*run)(Job&, float*)) {
  if (job.dtype == DType::kF32) return run(job, reinterpret_cast<float*>(job.data));
  if (job.prepare || job.arrived) throw InternalError("only floats of 32 bits come in segments");
  const size_t nbytes = static_cast<size_t>(job.count) * sizeof(float);
  auto* wide = reinterpret_cast<float*>(job.scratch.get(Scratch::kWide, nbytes));
  widen(job.dtype, wide, job.data, job.count);
  run(job, wide);
  narrow(job.dtype, job.data, wide, job.count);
}

}  // namespace bagua
