// What fp16 and bf16 have in common: floats of 16 bits, rounded to nearest even, in memory that
// need not be aligned.
#pragma once

#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "kernel/half.h"

namespace bagua {

template <DType kType>
struct HalfWire {
  static int64_t wire_nbytes(const Coding&, int64_t count) { return 2 * count; }
  static void encode(const Coding&, const float* in, int64_t count, char* wire, Isa isa) {
    if (reinterpret_cast<uintptr_t>(wire) % 2 == 0) return narrow(kType, wire, in, count, isa);
    uint16_t tile[kTile];
    for (int64_t at = 0; at < count; at += kTile) {
      const int64_t n = std::min(kTile, count - at);
      narrow(kType, tile, in + at, n, isa);
      std::memcpy(wire + 2 * at, tile, static_cast<size_t>(2 * n));
    }
  }
  static void decode(const Coding&, const char* wire, int64_t count, float* out, Isa isa) {
    if (reinterpret_cast<uintptr_t>(wire) % 2 == 0) return widen(kType, out, wire, count, isa);
    uint16_t tile[kTile];
    for (int64_t at = 0; at < count; at += kTile) {
      const int64_t n = std::min(kTile, count - at);
      std::memcpy(tile, wire + 2 * at, static_cast<size_t>(2 * n));
      widen(kType, out + at, tile, n, isa);
    }
  }

 private:
  static constexpr int64_t kTile = 2048;
};

}  // namespace bagua
