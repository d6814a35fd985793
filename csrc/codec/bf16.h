// bfloat16, rounded to nearest even: 2 bytes a value.
#pragma once

#include "codec/codec.h"
#include "kernel/half.h"

namespace bagua {

struct Bf16 {
  static int64_t wire_nbytes(const Coding&, int64_t count) { return 2 * count; }
  static void encode(const Coding&, const float* in, int64_t count, char* wire, Isa isa) {
    narrow(DType::kBF16, wire, in, count, isa);
  }
  static void decode(const Coding&, const char* wire, int64_t count, float* out, Isa isa) {
    widen(DType::kBF16, out, wire, count, isa);
  }
};

}  // namespace bagua
