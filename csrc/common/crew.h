// Threads that help another one with large pieces of work while it would do them alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace bagua {

class Crew {
 public:
  using Work = std::function<void(int64_t begin, int64_t count)>;

  // `idle` says whether there are cores to help on.
  explicit Crew(int helpers, std::function<bool()> idle = [] { return true; });
  ~Crew();
  Crew(const Crew&) = delete;

  int size() const { return static_cast<int>(helpers_.size()); }
  bool idle() const { return idle_(); }
  // How often a helper has joined.
  int64_t joined() const { return joined_.load(std::memory_order_relaxed); }

  // Calls work on pieces of [0, count), here and on helpers that are awake in time, and returns
  // when all of it is done. Work must not throw. One caller at a time.
  void share(int64_t count, int64_t piece, const Work& work);

 private:
  void help();
  void take_pieces(const Work& work);

  const std::function<bool()> idle_;
  std::atomic<int64_t> joined_{0};
  std::mutex mutex_;
  std::condition_variable wanted_, all_left_;
  const Work* work_ = nullptr;     // mutex_: null when there is none to join
  uint64_t number_ = 0;            // mutex_: of the work
  int busy_ = 0;                   // mutex_: helpers that have joined
  bool ends_ = false;              // mutex_
  int64_t count_ = 0, piece_ = 1;  // as long as there is work
  std::atomic<int64_t> next_{0};
  std::vector<std::thread> helpers_;
};

}  // namespace bagua
