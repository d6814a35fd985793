// Walks the blocks of a format with the 32 lanes of a GPU's warp, a block at a time and all of it
// in registers. Lanes hold values, and gather them, in the order that CPUs do (format.h), so bytes
// are the same.
//
// A Warp says: lane(); down(x, d), the x of the lane d further on; across(x, d), that of the lane
// whose number has bit d otherwise; and first(x), that of lane 0. All lanes call these together.
#pragma once

#include "codec/format.h"

namespace bagua {

// Which values of a block each lane holds: of every row some, which are loaded at once.
template <class C>
struct Lanes {
  static constexpr int kEach = C::kBlock / kLanes;
  BAGUA_BOTH static constexpr int place(int lane, int k) {
    return k / kSideBySide * kRow + lane * kSideBySide + k % kSideBySide;
  }
  // Whether that is among the first n; on one side of the question is what compilers know of k.
  BAGUA_BOTH static bool has(int lane, int k, int n) {
    return n == C::kBlock || place(0, k) < n - place(lane, 0);
  }
};

// Whether the n values at x are all of a block, in whole rows.
template <class C>
BAGUA_BOTH bool in_rows(const float* x, int n) {
  return n == C::kBlock && in_sides(x);
}

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
struct Values {
  float of[Lanes<C>::kEach];
};

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

// Calls f(k, value) for each of this lane's values of the whole block at x, which is in rows, so
// that all loads begin before one has ended.
template <class C, class Warp, class F>
BAGUA_BOTH void for_rows(const Warp& warp, const float* x, F&& f) {
  BAGUA_UNROLL
  for (int k = 0; k < Lanes<C>::kEach; k += kSideBySide) {
    const auto side = *reinterpret_cast<const Side<float>*>(x + Lanes<C>::place(warp.lane(), k));
    BAGUA_UNROLL
    for (int j = 0; j < kSideBySide; ++j) f(k + j, side.of[j]);
  }
}
// The same of the n values at x, and with 0 past those.
template <class C, class Warp, class F>
BAGUA_BOTH void for_loaded(const Warp& warp, const float* x, int n, F&& f) {
  if (in_rows<C>(x, n)) return for_rows<C>(warp, x, f);
  BAGUA_UNROLL
  for (int k = 0; k < Lanes<C>::kEach; ++k) {
    float value = 0;
    if (Lanes<C>::has(warp.lane(), k, n)) value = x[Lanes<C>::place(warp.lane(), k)];
    f(k, value);
  }
}

template <class C, class Warp>
BAGUA_BOTH void load(const Warp& warp, const float* x, int n, Values<C>& values) {
  for_loaded<C>(warp, x, n, [&](int k, float value) { values.of[k] = value; });
}
template <class C, class Warp>
BAGUA_BOTH void load_on_top(const Warp& warp, const float* x, int n, Values<C>& values) {
  for_loaded<C>(warp, x, n, [&](int k, float value) { values.of[k] += value; });
}

// The values of this lane from the k-th on that are side by side, to their place in the n at x.
template <class C, bool kWhole, class Warp>
BAGUA_BOTH void store_side(const Warp& warp, const Side<float>& side, int k, int n, float* x) {
  const int i = Lanes<C>::place(warp.lane(), k);
  if constexpr (kWhole) {
    *reinterpret_cast<Side<float>*>(x + i) = side;
  } else {
    BAGUA_UNROLL
    for (int j = 0; j < kSideBySide; ++j)
      if (Lanes<C>::has(warp.lane(), k + j, n)) x[i + j] = side.of[j];
  }
}

template <class C, bool kWhole, class Warp>
BAGUA_BOTH void store_rows(const Warp& warp, const Values<C>& values, int n, float* x) {
  BAGUA_UNROLL
  for (int k = 0; k < Lanes<C>::kEach; k += kSideBySide) {
    Side<float> side;
    BAGUA_UNROLL
    for (int j = 0; j < kSideBySide; ++j) side.of[j] = values.of[k + j];
    store_side<C, kWhole>(warp, side, k, n, x);
  }
}
template <class C, class Warp>
BAGUA_BOTH void store(const Warp& warp, const Values<C>& values, int n, float* x) {
  if (in_rows<C>(x, n)) return store_rows<C, true>(warp, values, n, x);
  store_rows<C, false>(warp, values, n, x);
}

// What n < C::kBlock values are filled up with.
template <class C, class Warp>
BAGUA_BOTH void fill_up(const Warp& warp, int n, Values<C>& values) {
  if (n == C::kBlock) return;  // alike in all lanes
  const float first = moved(values.of[0], [&](uint32_t word) { return warp.first(word); });
  const float filling = C::Gathered::kPadsWithFirst ? first : 0.0f;
  BAGUA_UNROLL
  for (int k = 0; k < Lanes<C>::kEach; ++k)
    if (!Lanes<C>::has(warp.lane(), k, n)) values.of[k] = filling;
}

template <class C, class Warp>
BAGUA_BOTH typename C::Head head_of(const Warp& warp, const Values<C>& values, int n) {
  constexpr int kSeparate = C::Gathered::kInAnyOrder ? 1 : kSideBySide;
  typename C::Gathered all[kSeparate];
  BAGUA_UNROLL
  for (int k = 0; k < Lanes<C>::kEach; ++k) all[k % kSeparate].add(values.of[k]);
  BAGUA_UNROLL
  for (int half = kLanes / 2; half > 0; half /= 2) {
    BAGUA_UNROLL
    for (auto& some : all)
      some.merge(moved(some, [&](uint32_t word) { return warp.down(word, half); }));
  }
  BAGUA_UNROLL
  for (int half = kSeparate / 2; half > 0; half /= 2) {
    BAGUA_UNROLL
    for (int j = 0; j < half; ++j) all[j].merge(all[j + half]);
  }
  return moved(C::head_of(all[0], n), [&](uint32_t word) { return warp.first(word); });
}

// Of eight lanes side by side, the i-th four bits of the j-th become the j-th of the i-th.
template <class Warp>
BAGUA_BOTH uint32_t transposed(const Warp& warp, uint32_t word) {
  uint32_t low = 0xffffu;  // bits that stay in lanes whose number does not have the bit `half`
  BAGUA_UNROLL
  for (int half = 4; half > 0; half /= 2, low ^= low << (4 * half)) {
    const bool upper = (warp.lane() & half) != 0;
    const uint32_t other = warp.across(word, half), stays = upper ? ~low : low;
    const int by = upper ? 32 - 4 * half : 4 * half;
    word = (word & stays) | ((other << by | other >> (32 - by)) & ~stays);
  }
  return word;
}
// Of the 32 times 32 bits in eight rows, the first of those that are a lane's after that.
BAGUA_BOTH int first_bit(int lane) { return lane % 8 * kRow + lane / 8 * 32; }

// Codes of a bit, of up to 32 values.
BAGUA_BOTH void store_bits(uint32_t word, int n, uint8_t* to) {
  if (n >= 32) {
    at<uint32_t>(to) = word;
    return;
  }
  BAGUA_UNROLL
  for (int i = 0; i < 32; i += 8)
    if (i < n) to[i / 8] = static_cast<uint8_t>((word & ((1u << n) - 1)) >> i);
}
BAGUA_BOTH uint32_t load_bits(const uint8_t* from, int n) {
  if (n >= 32) return at<uint32_t>(from);
  uint32_t word = 0;
  BAGUA_UNROLL
  for (int i = 0; i < 32; i += 8)
    if (i < n) word |= static_cast<uint32_t>(from[i / 8]) << i;
  return word;
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

// This lane's codes, kCodes<C> to a word.
template <class C>
constexpr int kCodes = C::kBits == 1 ? 32 : 4;
template <class C>
struct Words {
  uint32_t of[Lanes<C>::kEach / kCodes<C>];
};
template <class C>
BAGUA_BOTH Words<C> words_of(const Values<C>& values, const typename C::Coder& coder) {
  Words<C> words = {};
  BAGUA_UNROLL
  for (int k = 0; k < Lanes<C>::kEach; ++k)
    words.of[k / kCodes<C>] |= C::code(values.of[k], coder) << (k % kCodes<C> * C::kBits);
#ifdef __CUDA_ARCH__  // whose compiler would keep each code beside the word that has it
  BAGUA_UNROLL
  for (uint32_t& word : words.of) asm("" : "+r"(word));
#endif
  return words;
}

// Those of n values, to what follows a head.
template <class C, class Warp>
BAGUA_BOTH void store_words(const Warp& warp, const Words<C>& words, int n, uint8_t* to) {
  BAGUA_UNROLL
  for (int k = 0; k < Lanes<C>::kEach; k += kCodes<C>) {
    const uint32_t word = words.of[k / kCodes<C>];
    if constexpr (C::kBits == 1) {
      const int first = k * kLanes + first_bit(warp.lane());
      store_bits(transposed(warp, word), n - first, to + first / 8);
    } else {
      using Word = typename Packed<C::kBits>::Word;
      uint8_t* place = to + Lanes<C>::place(warp.lane(), k) * C::kBits / 8;
      if (Lanes<C>::has(warp.lane(), k + 3, n)) {
        at<Word>(place) = static_cast<Word>(word);
      } else {
        const int left = (n - Lanes<C>::place(warp.lane(), k)) * C::kBits;
        BAGUA_UNROLL
        for (int bit = 0; bit < 4 * C::kBits; bit += 8)
          if (bit < left) place[bit / 8] = static_cast<uint8_t>((word & ((1u << left) - 1)) >> bit);
      }
    }
  }
}
template <class C, class Warp>
BAGUA_BOTH Words<C> load_words(const Warp& warp, const uint8_t* from, int n) {
  Words<C> words;
  BAGUA_UNROLL
  for (int k = 0; k < Lanes<C>::kEach; k += kCodes<C>) {
    uint32_t& word = words.of[k / kCodes<C>];
    if constexpr (C::kBits == 1) {
      const int first = k * kLanes + first_bit(warp.lane());
      word = transposed(warp, load_bits(from + first / 8, n - first));
    } else {
      const uint8_t* place = from + Lanes<C>::place(warp.lane(), k) * C::kBits / 8;
      word = 0;
      if (Lanes<C>::has(warp.lane(), k + 3, n)) {
        word = at<typename Packed<C::kBits>::Word>(place);
      } else {
        BAGUA_UNROLL
        for (int bit = 0; bit < 4 * C::kBits; bit += 8)
          if (Lanes<C>::has(warp.lane(), k + bit / C::kBits, n))
            word |= static_cast<uint32_t>(place[bit / 8]) << bit;
      }
    }
  }
  return words;
}

// The value that the k-th code says.
template <class C>
BAGUA_BOTH float value_in(const Words<C>& words, int k, const typename C::Coder& coder) {
  return C::value(words.of[k / kCodes<C>], coder, k % kCodes<C>);
}

// What the wire says of n values, and what it loses of them, row after row: each is stored before
// the next takes registers.
template <class C, bool kWhole, class Warp>
BAGUA_BOTH void tell(const Warp& warp, const Values<C>& values, const Words<C>& words,
                     const typename C::Coder& coder, int n, float* said, float* rest) {
  BAGUA_UNROLL
  for (int k = 0; k < Lanes<C>::kEach; k += kSideBySide) {
    Side<float> told, lost;
    BAGUA_UNROLL
    for (int j = 0; j < kSideBySide; ++j) {
      told.of[j] = value_in<C>(words, k + j, coder);
      lost.of[j] = finite_or_zero(values.of[k + j] - told.of[j]);
    }
    if (said) store_side<C, kWhole>(warp, told, k, n, said);
    if (rest) store_side<C, kWhole>(warp, lost, k, n, rest);
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
  const Words<C> words = words_of<C>(values, coder);
  store_words<C>(warp, words, n, wire + sizeof head);
  if (!said && !rest) return;
  if (in_rows<C>(said, n) && in_rows<C>(rest, n))  // null is aligned
    return tell<C, true>(warp, values, words, coder, n, said, rest);
  tell<C, false>(warp, values, words, coder, n, said, rest);
}

// Adds what the wire says to n values.
template <class C, bool Adds, class Warp>
BAGUA_BOTH void decode_block(const Warp& warp, const uint8_t* wire, int n, Values<C>& values) {
  const typename C::Coder coder = C::coder_of(at<typename C::Head>(wire));
  const Words<C> words = load_words<C>(warp, wire + sizeof(typename C::Head), n);
  BAGUA_UNROLL
  for (int k = 0; k < Lanes<C>::kEach; ++k) {
    if (Adds) {
      values.of[k] += C::term(words.of[k / kCodes<C>], coder, k % kCodes<C>);
    } else {
      values.of[k] = value_in<C>(words, k, coder);
    }
  }
}

}  // namespace bagua
