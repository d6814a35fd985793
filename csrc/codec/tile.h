// Values that are coded one by one, a tile at a time by the threads of a GPU's block.
#pragma once

#include "codec/format.h"
#include "codec/singles.h"

namespace bagua {

template <class S>
struct Tile {
  using Wire = typename S::Wire;
  // Of a tile each thread has some, by sides.
  static constexpr int kThreads = 256, kEach = 8, kValues = kThreads * kEach;

  // A thread's values: sides, or every 256th of n where memory does not lie so or is not all there.
  // Either way those of neighbours are side by side, and all are loaded before one is stored. Where
  // there are no more the last is loaded again, so that no load waits for a question.
  template <bool kInSides>
  struct Place {
    int thread;
    int64_t begin;
    int n;
    BAGUA_BOTH int at(int k) const {
      return k * kThreads + (kInSides ? thread * kSideBySide : thread);
    }
    template <class T>
    BAGUA_BOTH void load(const T* from, T (&to)[kEach]) const {
      BAGUA_UNROLL
      for (int k = 0; k < kEach; k += kSideBySide) {
        if constexpr (kInSides) {
          const auto side = *reinterpret_cast<const Side<T>*>(from + begin + at(k));
          BAGUA_UNROLL
          for (int j = 0; j < kSideBySide; ++j) to[k + j] = side.of[j];
        } else {
          BAGUA_UNROLL
          for (int j = k; j < k + kSideBySide; ++j)
            to[j] = from[begin + (at(j) < n ? at(j) : n - 1)];
        }
      }
    }
    template <class T>
    BAGUA_BOTH void store(const T (&from)[kEach], T* to) const {
      BAGUA_UNROLL
      for (int k = 0; k < kEach; k += kSideBySide) {
        if constexpr (kInSides) {
          Side<T> side;
          BAGUA_UNROLL
          for (int j = 0; j < kSideBySide; ++j) side.of[j] = from[k + j];
          *reinterpret_cast<Side<T>*>(to + begin + at(k)) = side;
        } else {
          BAGUA_UNROLL
          for (int j = k; j < k + kSideBySide; ++j)
            if (at(j) < n) to[begin + at(j)] = from[j];
        }
      }
    }
  };
  // Calls f(place) for the tile that begins there, of `count` values.
  template <class F>
  BAGUA_BOTH static void visit(int thread, int64_t begin, int64_t count, bool aligned, F&& f) {
    const int64_t left = count - begin;
    if (aligned && left >= kValues) {
      f(Place<true>{thread, begin, kValues});
    } else {
      f(Place<false>{thread, begin, left < kValues ? static_cast<int>(left) : kValues});
    }
  }

  // Encodes x and what is in the residual, unless that is null.
  template <class P>
  BAGUA_BOTH static void code(const P& place, float (&x)[kEach], float* residual, Wire* wire,
                              Wire (&codes)[kEach]) {
    float lost[kEach];
    if (residual) {
      place.load(residual, lost);
      BAGUA_UNROLL
      for (int k = 0; k < kEach; ++k) x[k] += lost[k];
    }
    BAGUA_UNROLL
    for (int k = 0; k < kEach; ++k) codes[k] = S::code(x[k]);
    place.store(codes, wire);
    if (!residual) return;
    BAGUA_UNROLL
    for (int k = 0; k < kEach; ++k) lost[k] = finite_or_zero(x[k] - S::value(codes[k]));
    place.store(lost, residual);
  }
  template <class P>
  BAGUA_BOTH static void encode(const P& place, const float* in, float* residual, Wire* wire) {
    float x[kEach];
    Wire codes[kEach];
    place.load(in, x);
    code(place, x, residual, wire, codes);
  }
  template <class P>
  BAGUA_BOTH static void decode(const P& place, const Wire* wire, float* out) {
    float x[kEach];
    Wire codes[kEach];
    place.load(wire, codes);
    BAGUA_UNROLL
    for (int k = 0; k < kEach; ++k) x[k] = S::value(codes[k]);
    place.store(x, out);
  }
  // Adds up what wires say, where from(i) is one of them.
  template <class P, class From, class F>
  BAGUA_BOTH static void add_up(const P& place, int wires, From&& from, F&& finish, float* residual,
                                Wire* wire, float* out) {
    float sum[kEach] = {};
    Wire codes[kEach];
    // Of several the codes are loaded before the first is used.
    BAGUA_UNROLL_4
    for (int i = 0; i < wires; ++i) {
      place.load(from(i), codes);
      BAGUA_UNROLL
      for (int k = 0; k < kEach; ++k) sum[k] += S::term(codes[k]);
    }
    finish(sum);
    code(place, sum, residual, wire, codes);
    BAGUA_UNROLL
    for (int k = 0; k < kEach; ++k) sum[k] = S::value(codes[k]);
    place.store(sum, out);
  }
};

}  // namespace bagua
