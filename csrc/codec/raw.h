// float32 as it is: 4 bytes a value.
#pragma once

#include <cstring>

#include "codec/codec.h"

namespace bagua {

struct Raw {
  static int64_t wire_nbytes(const Coding&, int64_t count) { return 4 * count; }
  static void encode(const Coding&, const float* in, int64_t count, char* wire, Isa) {
    if (count > 0) std::memcpy(wire, in, static_cast<size_t>(4 * count));
  }
  static void decode(const Coding&, const char* wire, int64_t count, float* out, Isa) {
    if (count > 0) std::memcpy(out, wire, static_cast<size_t>(4 * count));
  }
};

}  // namespace bagua
