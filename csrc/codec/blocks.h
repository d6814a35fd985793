// Walks the blocks of a format on a CPU. W is how many floats a vector of the processor holds; it
// changes nothing but the speed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "codec/format.h"

namespace bagua {

template <int W>
struct Vectors {
  // NOLINTBEGIN: an alias loses the attribute
  typedef float F __attribute__((vector_size(4 * W)));
  typedef int32_t I __attribute__((vector_size(4 * W)));
  // NOLINTEND
};

// One for each lane of a vector.
template <int W, class V, class I>
BAGUA_BOTH void spread(const Extremes<V, I>& all, Extremes<float, int32_t> (&one)[W]) {
  for (int k = 0; k < W; ++k) one[k] = {all.lo[k], all.hi[k], all.bad[k]};
}
template <int W, class V, class I>
BAGUA_BOTH void spread(const Magnitude<V, I>& all, Magnitude<float, int32_t> (&one)[W]) {
  for (int k = 0; k < W; ++k) one[k] = {all.top[k]};
}
template <int W, class V, class I>
BAGUA_BOTH void spread(const AbsoluteSum<V, I>& all, AbsoluteSum<float, int32_t> (&one)[W]) {
  for (int k = 0; k < W; ++k) one[k] = {all.sum[k]};
}

// What is gathered of a whole block.
template <class C, int W>
BAGUA_BOTH typename C::template Gathered<float, int32_t> gather_block(const float* x) {
  using F = typename Vectors<W>::F;
  using I = typename Vectors<W>::I;
  constexpr int kVectors = kLanes / W;
  typename C::template Gathered<F, I> lanes[kVectors];
  for (int k = 0; k < kVectors; ++k) {
    F value;
    memcpy(&value, x + k * W, sizeof value);
    lanes[k].begin(value);
  }
  for (int i = 0; i < C::kBlock; i += kLanes) {
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) {
      F value;
      I bits;
      memcpy(&value, x + i + k * W, sizeof value);
      memcpy(&bits, &value, sizeof bits);
      lanes[k].add(value, bits);
    }
  }
  for (int half = kVectors / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) lanes[k].merge(lanes[k + half]);
  typename C::template Gathered<float, int32_t> one[W];
  spread(lanes[0], one);
  for (int half = W / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) one[k].merge(one[k + half]);
  return one[0];
}

// Codes of n values, one to a byte, to what travels.
template <int Bits>
BAGUA_BOTH void pack(const uint8_t* codes, int n, uint8_t* wire) {
  if constexpr (Bits == 4) {
    for (int j = 0; j < n / 2; ++j)
      wire[j] = static_cast<uint8_t>(codes[2 * j] | codes[2 * j + 1] << 4);
  } else {
    static_assert(Bits == 1);
    for (int j = 0; j < n / 8; ++j) {
      uint64_t eight;
      memcpy(&eight, codes + 8 * j, 8);
      wire[j] = static_cast<uint8_t>(eight * 0x0102040810204080u >> 56);
    }
  }
}

// Block `x`, filled up if n values are less than C::kBlock. With a residual what encoding loses of
// x becomes that; a NaN or an Inf is told once, not for ever.
template <class C, int W>
BAGUA_BOTH void encode_block(const float* x, int n, uint8_t* wire, float* residual = nullptr) {
  const typename C::Head head = C::head_of(gather_block<C, W>(x), n);
  memcpy(wire, &head, sizeof head);
  const typename C::Coder coder = C::coder_of(head);
  uint8_t* codes = wire + sizeof head;
  uint8_t loose[C::kBits == 8 ? 1 : C::kBlock];
  uint8_t* bytes = C::kBits == 8 ? codes : loose;
  for (int i = 0; i < C::kBlock; ++i) bytes[i] = static_cast<uint8_t>(C::code(x[i], coder));
  if constexpr (C::kBits != 8) pack<C::kBits>(loose, C::kBlock, codes);
  if (!residual) return;
  for (int i = 0; i < C::kBlock; ++i)
    residual[i] = finite_or_zero(x[i] - C::value(bytes[i], coder));
}

// Into x, or on top of what is there.
template <class C, bool Adds>
BAGUA_BOTH void decode_block(const uint8_t* __restrict wire, float* __restrict x) {
  typename C::Head head;
  memcpy(&head, wire, sizeof head);
  const typename C::Coder coder = C::coder_of(head);
  const uint8_t* __restrict codes = wire + sizeof head;
  if constexpr (C::kBits == 1) {  // a word at a time, its bits side by side in vectors
    for (int j = 0; j < C::kBlock; j += 32) {
      uint32_t word;
      memcpy(&word, codes + j / 8, sizeof word);
      for (int k = 0; k < 32; ++k) {
        const float value = C::value(word >> k & 1, coder);
        x[j + k] = Adds ? x[j + k] + value : value;
      }
    }
    return;
  }
  constexpr int kPerByte = 8 / C::kBits;
  constexpr uint32_t kMask = (1u << C::kBits) - 1;
  for (int j = 0; j < C::kBlock / kPerByte; ++j)
#pragma GCC unroll 8
    for (int k = 0; k < kPerByte; ++k) {
      const int i = j * kPerByte + k;
      const float value = C::value(codes[j] >> (k * C::kBits) & kMask, coder);
      x[i] = Adds ? x[i] + value : value;
    }
}

// The last block may have fewer values; it is coded as if it were filled up, and cut.
template <class C, int W>
BAGUA_BOTH void encode_cut(const float* x, int64_t count, uint8_t* wire) {
  constexpr int64_t kWhole = block_nbytes<C>(C::kBlock);
  float filled[C::kBlock];
  uint8_t cut[kWhole];
  std::copy_n(x, count, filled);
  constexpr bool first = C::template Gathered<float, int32_t>::kPadsWithFirst;
  std::fill(filled + count, filled + C::kBlock, first ? x[0] : 0.0f);
  encode_block<C, W>(filled, static_cast<int>(count), cut);
  const int spare =
      static_cast<int>(block_nbytes<C>(count) * 8 -
                       (static_cast<int64_t>(sizeof(typename C::Head)) * 8) - count * C::kBits);
  if (spare > 0) cut[block_nbytes<C>(count) - 1] &= static_cast<uint8_t>(0xff >> spare);
  memcpy(wire, cut, static_cast<size_t>(block_nbytes<C>(count)));
}

template <class C, int W>
BAGUA_BOTH void encode_blocks(const float* x, int64_t count, uint8_t* wire) {
  constexpr int64_t kWhole = block_nbytes<C>(C::kBlock);
  for (; count >= C::kBlock; count -= C::kBlock, x += C::kBlock, wire += kWhole)
    encode_block<C, W>(x, C::kBlock, wire);
  if (count > 0) encode_cut<C, W>(x, count, wire);
}

template <class C, bool Adds>
BAGUA_BOTH void decode_blocks(const uint8_t* wire, int64_t count, float* x) {
  constexpr int64_t kWhole = block_nbytes<C>(C::kBlock);
  for (; count >= C::kBlock; count -= C::kBlock, x += C::kBlock, wire += kWhole)
    decode_block<C, Adds>(wire, x);
  if (count == 0) return;
  float filled[C::kBlock] = {};
  uint8_t cut[kWhole] = {};
  if (Adds) std::copy_n(x, count, filled);
  memcpy(cut, wire, static_cast<size_t>(block_nbytes<C>(count)));
  decode_block<C, Adds>(cut, filled);
  std::copy_n(filled, count, x);
}

// Encodes x + residual, and makes residual what is left of that.
template <class C, int W>
BAGUA_BOTH void encode_rests(const float* x, float* residual, int64_t count, uint8_t* wire) {
  constexpr int64_t kWhole = block_nbytes<C>(C::kBlock);
  float whole[C::kBlock];
  for (; count >= C::kBlock; count -= C::kBlock, wire += kWhole) {
    for (int i = 0; i < C::kBlock; ++i) whole[i] = x[i] + residual[i];
    encode_block<C, W>(whole, C::kBlock, wire, residual);
    x += C::kBlock, residual += C::kBlock;
  }
  if (count == 0) return;
  float said[C::kBlock];
  for (int i = 0; i < count; ++i) whole[i] = x[i] + residual[i];
  encode_cut<C, W>(whole, count, wire);
  decode_blocks<C, false>(wire, count, said);
  for (int i = 0; i < count; ++i) residual[i] = finite_or_zero(whole[i] - said[i]);
}

}  // namespace bagua
