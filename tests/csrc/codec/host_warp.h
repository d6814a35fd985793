// Threads of the host that stand for the lanes of a GPU's warp.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "codec/format.h"

namespace bagua {

// Lanes that go from word to word together. On a GPU that orders nothing but the words: what lanes
// wrote to memory others see after sync(), and ThreadSanitizer tells of those that look before.
class Lockstep {
 public:
  std::vector<uint32_t> exchange(int lane, uint32_t word) {
    const int round = round_.load(std::memory_order_relaxed);
    words_[round % 2][lane].store(word, std::memory_order_relaxed);
    meet(round, kOfWords);
    return {words_[round % 2], words_[round % 2] + kLanes};
  }
  void sync() { meet(round_.load(std::memory_order_relaxed), std::memory_order_acq_rel); }

 private:
#ifdef __has_feature  // Clang's
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__
#endif
#endif
#ifdef __SANITIZE_THREAD__  // which is to see no order but that of sync(), though there is one
  static constexpr auto kOfWords = std::memory_order_relaxed;
#else
  static constexpr auto kOfWords = std::memory_order_acq_rel;
#endif
  void meet(int round, std::memory_order order) {
    if (arrived_.fetch_add(1, order) + 1 == kLanes) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, order);
    } else {
      while (round_.fetch_add(0, order) == round) std::this_thread::yield();
    }
  }

  std::atomic<uint32_t> words_[2][kLanes] = {};
  std::atomic<int> arrived_{0}, round_{0};
};

struct HostWarp {
  int lane() const { return my_lane; }
  uint32_t down(uint32_t x, int d) const {
    const auto words = together.exchange(my_lane, x);
    return words[static_cast<size_t>(my_lane + d < kLanes ? my_lane + d : my_lane)];
  }
  uint32_t across(uint32_t x, int d) const {
    return together.exchange(my_lane, x)[static_cast<size_t>(my_lane ^ d)];
  }
  uint32_t first(uint32_t x) const { return together.exchange(my_lane, x)[0]; }
  uint32_t sum(uint32_t x) const {
    const auto words = together.exchange(my_lane, x);
    return std::accumulate(words.begin(), words.end(), 0u);
  }
  uint32_t most(uint32_t x) const {
    const auto words = together.exchange(my_lane, x);
    return *std::max_element(words.begin(), words.end());
  }
  void sync() const { together.sync(); }
  int my_lane;
  Lockstep& together;
};

inline void run_warp(const std::function<void(const HostWarp&)>& body) {
  Lockstep together;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kLanes; ++lane)
    lanes.emplace_back([&, lane] { body(HostWarp{lane, together}); });
  for (std::thread& lane : lanes) lane.join();
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace bagua
