// Walks the blocks of a format on a CPU, in loops that compilers turn into vectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "codec/format.h"

namespace bagua {

// What is gathered of a whole block.
template <class C>
BAGUA_BOTH typename C::Gathered gather_block(const float* x) {
  static_assert(C::kBlock % kRow == 0);
  constexpr int kSeparate = C::Gathered::kInAnyOrder ? 1 : kRow;
  typename C::Gathered places[kSeparate];
  for (int i = 0; i < C::kBlock; i += kSeparate)
    for (int p = 0; p < kSeparate; ++p) places[p].add(x[i + p]);
  for (int half = kSeparate / 2; half > 0; half /= 2)
    for (int p = 0; p < half; ++p) places[p].merge(places[p + half]);
  return places[0];
}

// Codes of n values, one to a byte, to what travels.
template <int Bits>
BAGUA_BOTH void pack(const uint8_t* codes, int n, uint8_t* wire) {
  if constexpr (Bits == 4) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
    for (int j = 0; j < n / 2; ++j) {
      uint16_t two;
      memcpy(&two, codes + 2 * j, 2);
      wire[j] = static_cast<uint8_t>(two | two >> 4);
    }
  } else {
    static_assert(Bits == 1);
    for (int j = 0; j < n / 8; ++j) {
      uint64_t eight;
      memcpy(&eight, codes + 8 * j, 8);
      wire[j] = static_cast<uint8_t>(eight * 0x0102040810204080u >> 56);
    }
  }
}

// The head of n values, which takes a while: something else may be done meanwhile.
template <class C>
BAGUA_BOTH typename C::Coder put_head(const typename C::Gathered& all, int n, uint8_t* wire) {
  const typename C::Head head = C::head_of(all, n);
  memcpy(wire, &head, sizeof head);
  return C::coder_of(head);
}

// Asks for the values that are read a while after x, a few at a time between others' codes:
// processors look ahead by themselves only while they find nothing else to do than to read. At the
// end it asks for what is no longer theirs: that changes nothing, and is ignored if nothing is
// there.
constexpr int kAskedFor = 128;
BAGUA_BOTH void ask_ahead(const float* x) {
  constexpr uintptr_t kAhead = 64 << 10, kLine = 64;
  constexpr int kToRead = 0, kSecondCache = 2;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x) + kAhead;
  for (uintptr_t line = begin; line < begin + kAskedFor * sizeof(float); line += kLine)
    __builtin_prefetch(reinterpret_cast<const void*>(line), kToRead, kSecondCache);
}

// The codes of block `x`, while what follows `source` is asked for, unless that is null. With a
// residual what they lose of x becomes that; a NaN or an Inf is told once, not for ever.
template <class C>
BAGUA_BOTH void put_codes(const float* x, const typename C::Coder& coder, uint8_t* wire,
                          const float* source = nullptr, float* residual = nullptr) {
  static_assert(C::kBlock % kAskedFor == 0);
  uint8_t* codes = wire + sizeof(typename C::Head);
  uint8_t loose[C::kBits == 8 ? 1 : C::kBlock];
  uint8_t* bytes = C::kBits == 8 ? codes : loose;
  for (int i = 0; i < C::kBlock; i += kAskedFor) {
    if (source) ask_ahead(source + i);
    if (residual) ask_ahead(residual + i);
    for (int j = i; j < i + kAskedFor; ++j) bytes[j] = static_cast<uint8_t>(C::code(x[j], coder));
  }
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
template <class C>
BAGUA_BOTH void encode_cut(const float* x, int64_t count, uint8_t* wire) {
  constexpr int64_t kWhole = block_nbytes<C>(C::kBlock);
  float filled[C::kBlock];
  uint8_t cut[kWhole];
  std::copy_n(x, count, filled);
  constexpr bool first = C::Gathered::kPadsWithFirst;
  std::fill(filled + count, filled + C::kBlock, first ? x[0] : 0.0f);
  put_codes<C>(filled, put_head<C>(gather_block<C>(filled), static_cast<int>(count), cut), cut);
  const int spare =
      static_cast<int>(block_nbytes<C>(count) * 8 -
                       (static_cast<int64_t>(sizeof(typename C::Head)) * 8) - count * C::kBits);
  if (spare > 0) cut[block_nbytes<C>(count) - 1] &= static_cast<uint8_t>(0xff >> spare);
  memcpy(wire, cut, static_cast<size_t>(block_nbytes<C>(count)));
}

template <class C>
BAGUA_BOTH void encode_blocks(const float* x, int64_t count, uint8_t* wire) {
  constexpr int64_t kWhole = block_nbytes<C>(C::kBlock);
  typename C::Gathered next;
  if (count >= C::kBlock) next = gather_block<C>(x);
  for (; count >= C::kBlock; count -= C::kBlock, x += C::kBlock, wire += kWhole) {
    const typename C::Coder coder = put_head<C>(next, C::kBlock, wire);
    if (count >= 2 * C::kBlock) next = gather_block<C>(x + C::kBlock);
    put_codes<C>(x, coder, wire, x);
  }
  if (count > 0) encode_cut<C>(x, count, wire);
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

template <class C>
BAGUA_BOTH typename C::Gathered gather_sums(const float* a, const float* b, float* sums) {
  for (int i = 0; i < C::kBlock; ++i) sums[i] = a[i] + b[i];
  return gather_block<C>(sums);
}

// Encodes x + residual, and makes residual what is left of that.
template <class C>
BAGUA_BOTH void encode_rests(const float* x, float* residual, int64_t count, uint8_t* wire) {
  constexpr int64_t kWhole = block_nbytes<C>(C::kBlock);
  float both[2][C::kBlock], said[C::kBlock];
  float *whole = both[0], *after = both[1];
  typename C::Gathered next;
  if (count >= C::kBlock) next = gather_sums<C>(x, residual, whole);
  for (; count >= C::kBlock; count -= C::kBlock, wire += kWhole) {
    const typename C::Coder coder = put_head<C>(next, C::kBlock, wire);
    if (count >= 2 * C::kBlock) next = gather_sums<C>(x + C::kBlock, residual + C::kBlock, after);
    put_codes<C>(whole, coder, wire, x, residual);
    x += C::kBlock;
    residual += C::kBlock;
    std::swap(whole, after);
  }
  if (count == 0) return;
  for (int i = 0; i < count; ++i) whole[i] = x[i] + residual[i];
  encode_cut<C>(whole, count, wire);
  decode_blocks<C, false>(wire, count, said);
  for (int i = 0; i < count; ++i) residual[i] = finite_or_zero(whole[i] - said[i]);
}

}  // namespace bagua
