// float16, rounded to nearest even; overflow becomes Inf: 2 bytes a value.
#pragma once

#include "codec/half_wire.h"

namespace bagua {

struct Fp16 {
  static int64_t wire_nbytes(const Coding&, int64_t count) { return 2 * count; }
  static void encode(const Coding&, const float* in, int64_t count, char* wire, Isa isa) {
    encode_half(DType::kF16, in, count, wire, isa);
  }
  static void decode(const Coding&, const char* wire, int64_t count, float* out, Isa isa) {
    decode_half(DType::kF16, wire, count, out, isa);
  }
};

}  // namespace bagua
