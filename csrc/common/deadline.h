// Ends this process, whatever its threads wait in, unless it is called off in time.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace bagua {

class Deadline {
 public:
  Deadline(double seconds, std::string last_words)
      : seconds_(seconds), last_words_(std::move(last_words)) {}
  ~Deadline() { call_off(); }
  Deadline(const Deadline&) = delete;
  // Where there is no thread for it, it does nothing.
  void begin() {
    try {
      thread_ = std::thread([this] { wait(); });
    } catch (const std::system_error&) {
    }
  }
  void call_off() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      off_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::duration<double>(seconds_), [&] { return off_; }))
      return;
    const auto written = ::write(STDERR_FILENO, last_words_.data(), last_words_.size());
    ::_exit(written < 0 ? 2 : 1);
  }

  const double seconds_;
  const std::string last_words_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool off_ = false;
  std::thread thread_;
};

}  // namespace bagua
