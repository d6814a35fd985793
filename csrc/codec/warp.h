// Walks the blocks of a format with the 32 lanes of a GPU's warp, a block at a time and all of it
// in registers. Lanes hold values, and gather them, in the order that CPUs do (format.h), so bytes
// are the same.
//
// A Warp says: lane(); down(x, d), the x of the lane d further on; first(x), that of lane 0; and
// vote(b), a bit from each lane. All lanes call these together.
#pragma once

#include "codec/format.h"

namespace bagua {

// Which values of a block each lane holds.
template <class C>
struct Lanes {
  static constexpr int kEach = C::kBlock / kLanes;
  // Four in a row are loaded at once; but a gathering that depends on the order wants every 32nd.
  static constexpr bool kInFours = C::Gathered::kInAnyOrder;
  BAGUA_BOTH static int place(int lane, int k) {
    return kInFours ? k / 4 * (4 * kLanes) + lane * 4 + k % 4 : k * kLanes + lane;
  }
};

struct alignas(16) Four {
  float of[4];
};
BAGUA_BOTH bool has_fours(const float* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; }

// Memory where a wire has codes of several values; aligned as wires are.
template <class T>
BAGUA_BOTH T& at(uint8_t* wire) {
  return *reinterpret_cast<T*>(wire);
}
template <class T>
BAGUA_BOTH T at(const uint8_t* wire) {
  return *reinterpret_cast<const T*>(wire);
}

// Values of one block.
template <class C>
struct alignas(16) Values {
  float of[Lanes<C>::kEach];
};
template <class C>
BAGUA_BOTH Four& four_of(Values<C>& values, int k) {
  return *reinterpret_cast<Four*>(values.of + k);
}
template <class C>
BAGUA_BOTH const Four& four_of(const Values<C>& values, int k) {
  return *reinterpret_cast<const Four*>(values.of + k);
}

// Lets words travel between lanes, whatever they are part of.
template <class T, class Move>
BAGUA_BOTH T moved(const T& value, Move&& move) {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &value, sizeof value);
  for (uint32_t& word : words) word = move(word);
  T result;
  memcpy(&result, words, sizeof result);
  return result;
}

// Calls f(k, place) for those of this lane's values that are among the first n.
template <class C, class Warp, class F>
BAGUA_BOTH void for_values(const Warp& warp, int n, F&& f) {
  for (int k = 0; k < Lanes<C>::kEach; ++k) {
    const int i = Lanes<C>::place(warp.lane(), k);
    if (n == C::kBlock || i < n) f(k, i);
  }
}

template <class C, class Warp>
BAGUA_BOTH void load(const Warp& warp, const float* x, int n, Values<C>& values) {
  if (Lanes<C>::kInFours && n == C::kBlock && has_fours(x)) {
    for (int k = 0; k < Lanes<C>::kEach; k += 4)
      four_of(values, k) = *reinterpret_cast<const Four*>(x + Lanes<C>::place(warp.lane(), k));
    return;
  }
  for_values<C>(warp, n, [&](int k, int i) { values.of[k] = x[i]; });
}

template <class C, class Warp>
BAGUA_BOTH void store(const Warp& warp, const Values<C>& values, int n, float* x) {
  if (Lanes<C>::kInFours && n == C::kBlock && has_fours(x)) {
    for (int k = 0; k < Lanes<C>::kEach; k += 4)
      *reinterpret_cast<Four*>(x + Lanes<C>::place(warp.lane(), k)) = four_of(values, k);
    return;
  }
  for_values<C>(warp, n, [&](int k, int i) { x[i] = values.of[k]; });
}

// What n < C::kBlock values are filled up with.
template <class C, class Warp>
BAGUA_BOTH void fill_up(const Warp& warp, int n, Values<C>& values) {
  if (n == C::kBlock) return;  // alike in all lanes
  const float first = moved(values.of[0], [&](uint32_t word) { return warp.first(word); });
  const float filling = C::Gathered::kPadsWithFirst ? first : 0.0f;
  for (int k = 0; k < Lanes<C>::kEach; ++k)
    if (Lanes<C>::place(warp.lane(), k) >= n) values.of[k] = filling;
}

template <class C, class Warp>
BAGUA_BOTH typename C::Head head_of(const Warp& warp, const Values<C>& values, int n) {
  typename C::Gathered all;
  for (const float x : values.of) all.add(x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    all.merge(moved(all, [&](uint32_t word) { return warp.down(word, half); }));
  return moved(C::head_of(all, n), [&](uint32_t word) { return warp.first(word); });
}

// What holds the codes of four values.
template <int Bits>
struct Packed;
template <>
struct Packed<8> {
  using Word = uint32_t;
};
template <>
struct Packed<4> {
  using Word = uint16_t;
};

// Codes of n values, code(k) of this lane's k-th, to what follows a head.
template <class C, class Warp, class Code>
BAGUA_BOTH void store_codes(const Warp& warp, Code&& code, int n, uint8_t* to) {
  constexpr int kEach = Lanes<C>::kEach;
  if constexpr (C::kBits == 1) {
    for (int k = 0; k < kEach; ++k) {
      const uint32_t word = warp.vote(code(k) != 0);
      const int left = n - k * kLanes;
      if (warp.lane() != k % kLanes || left <= 0) continue;
      if (left >= kLanes) {
        at<uint32_t>(to + k * 4) = word;
        continue;
      }
      for (int b = 0; b * 8 < left; ++b) {
        const uint32_t mask = left - b * 8 >= 8 ? 0xffu : (1u << (left - b * 8)) - 1;
        to[k * 4 + b] = static_cast<uint8_t>(word >> (8 * b) & mask);
      }
    }
  } else {
    using Word = typename Packed<C::kBits>::Word;
    for (int k = 0; k < kEach; k += 4) {
      const int i = Lanes<C>::place(warp.lane(), k);
      uint32_t word = 0;
      for (int j = 0; j < 4; ++j)
        if (n == C::kBlock || i + j < n) word |= code(k + j) << (j * C::kBits);
      uint8_t* place = to + i * C::kBits / 8;
      if (n == C::kBlock || i + 3 < n) {
        at<Word>(place) = static_cast<Word>(word);
      } else {
        for (int bit = 0; i + bit / C::kBits < n; bit += 8)
          place[bit / 8] = static_cast<uint8_t>(word >> bit);
      }
    }
  }
}

template <class C, class Warp>
BAGUA_BOTH void load_codes(const Warp& warp, const uint8_t* from, int n, uint32_t* codes) {
  constexpr uint32_t kMask = (1u << C::kBits) - 1;
  if (n < C::kBlock) {
    for_values<C>(warp, n, [&](int k, int i) {
      codes[k] = from[i * C::kBits / 8] >> (i * C::kBits % 8) & kMask;
    });
  } else if constexpr (C::kBits == 1) {
    for (int k = 0; k < Lanes<C>::kEach; ++k)
      codes[k] = at<uint32_t>(from + k * 4) >> warp.lane() & 1u;
  } else {
    using Word = typename Packed<C::kBits>::Word;
    for (int k = 0; k < Lanes<C>::kEach; k += 4) {
      const uint32_t word = at<Word>(from + Lanes<C>::place(warp.lane(), k) * C::kBits / 8);
      for (int j = 0; j < 4; ++j) codes[k + j] = word >> (j * C::kBits) & kMask;
    }
  }
}

// Encodes n values. `said`, unless null, becomes what the wire says of them; `rest` what is lost.
template <class C, class Warp>
BAGUA_BOTH void encode_block(const Warp& warp, Values<C>& values, int n, uint8_t* wire, float* said,
                             float* rest) {
  fill_up<C>(warp, n, values);
  const typename C::Head head = head_of<C>(warp, values, n);
  const typename C::Coder coder = C::coder_of(head);
  if (warp.lane() == 0) at<typename C::Head>(wire) = head;
  const auto code = [&](int k) { return C::code(values.of[k], coder); };
  store_codes<C>(warp, code, n, wire + sizeof head);
  if (!said && !rest) return;
  Values<C> told;
  for (int k = 0; k < Lanes<C>::kEach; ++k) told.of[k] = C::value(code(k), coder);
  if (said) store<C>(warp, told, n, said);
  if (!rest) return;
  for (int k = 0; k < Lanes<C>::kEach; ++k)
    values.of[k] = finite_or_zero(values.of[k] - told.of[k]);
  store<C>(warp, values, n, rest);
}

// Adds what the wire says to n values.
template <class C, bool Adds, class Warp>
BAGUA_BOTH void decode_block(const Warp& warp, const uint8_t* wire, int n, Values<C>& values) {
  const typename C::Coder coder = C::coder_of(at<typename C::Head>(wire));
  uint32_t codes[Lanes<C>::kEach] = {};
  load_codes<C>(warp, wire + sizeof(typename C::Head), n, codes);
  for (int k = 0; k < Lanes<C>::kEach; ++k) {
    const float value = C::value(codes[k], coder);
    values.of[k] = Adds ? values.of[k] + value : value;
  }
}

}  // namespace bagua
