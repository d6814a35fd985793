// 16-bit floats in memory that need not be aligned.
#pragma once

#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "kernel/half.h"

namespace bagua {

constexpr int64_t kHalfTile = 2048;

inline void encode_half(DType dtype, const float* in, int64_t count, char* wire, Isa isa) {
  if (reinterpret_cast<uintptr_t>(wire) % 2 == 0) return narrow(dtype, wire, in, count, isa);
  uint16_t tile[kHalfTile];
  for (int64_t at = 0; at < count; at += kHalfTile) {
    const int64_t n = std::min(kHalfTile, count - at);
    narrow(dtype, tile, in + at, n, isa);
    std::memcpy(wire + 2 * at, tile, static_cast<size_t>(2 * n));
  }
}

inline void decode_half(DType dtype, const char* wire, int64_t count, float* out, Isa isa) {
  if (reinterpret_cast<uintptr_t>(wire) % 2 == 0) return widen(dtype, out, wire, count, isa);
  uint16_t tile[kHalfTile];
  for (int64_t at = 0; at < count; at += kHalfTile) {
    const int64_t n = std::min(kHalfTile, count - at);
    std::memcpy(tile, wire + 2 * at, static_cast<size_t>(2 * n));
    widen(dtype, out + at, tile, n, isa);
  }
}

}  // namespace bagua
