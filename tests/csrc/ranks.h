// Ranks as threads: runs one function per rank and waits for all of them. A rank that hangs is
// named before the program is ended, because a stuck thread cannot be.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace bagua {

// Generous: only a hang reaches it, also under a sanitizer on a loaded machine.
constexpr int kHangS = 120;
// Who sleeps for so long has missed its word, and the test is ended before it wakes.
constexpr int kForeverS = 10 * kHangS;

class Ranks {
 public:
  explicit Ranks(int size) : notes_(static_cast<size_t>(size), "started") {}

  // What a rank is doing, for the word about a hang. Any thread.
  void note(int rank, const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    notes_[static_cast<size_t>(rank)] = text;
  }

  // An exception out of a rank is a failure of the test.
  void run(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(notes_.size()); ++rank)
      threads.emplace_back([this, rank, &body] {
        try {
          body(rank);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
        std::lock_guard<std::mutex> lock(mutex_);
        notes_[static_cast<size_t>(rank)].clear();
        ++finished_;
        changed_.notify_all();
      });
    watch();
    for (std::thread& thread : threads) thread.join();
  }

 private:
  void watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto all = [&] { return finished_ == notes_.size(); };
    if (changed_.wait_for(lock, std::chrono::seconds(kHangS), all)) return;
    for (size_t rank = 0; rank < notes_.size(); ++rank)
      if (!notes_[rank].empty())
        std::fprintf(stderr, "rank %zu hangs: %s\n", rank, notes_[rank].c_str());
    std::fflush(stderr);
    std::abort();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> notes_;  // by rank, empty when finished; mutex_
  size_t finished_ = 0;             // mutex_
};

inline void run_ranks(int size, const std::function<void(int)>& body) { Ranks(size).run(body); }

}  // namespace bagua
