#include "control/loopback_channel.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>

#include "common/clock.h"

namespace bagua {

class LoopbackChannel : public Channel {
 public:
  LoopbackChannel(LoopbackSwitchboard& board, int rank) : board_(board), rank_(rank) {}

  void send(int peer, std::string_view bytes) override {
    std::lock_guard<std::mutex> lock(board_.mutex_);
    if (board_.ends_[rank_].starved) throw std::bad_alloc();
    board_.ends_[peer].inbox.push_back({rank_, false, std::string(bytes)});
    board_.changed_.notify_all();
  }

  void receive(int timeout_us, std::vector<Message>& inbox) override {
    std::unique_lock<std::mutex> lock(board_.mutex_);
    auto& end = board_.ends_[rank_];
    sleep(lock, timeout_us, [&] { return end.woken || (!end.frozen && !end.inbox.empty()); });
    end.woken = false;
    if (end.starved) throw std::bad_alloc();
    if (end.frozen) return;
    std::move(end.inbox.begin(), end.inbox.end(), std::back_inserter(inbox));
    end.inbox.clear();
  }

  void wake() override {
    std::lock_guard<std::mutex> lock(board_.mutex_);
    board_.ends_[rank_].woken = true;
    board_.changed_.notify_all();
  }

  void wake_after(int delay_us) override {
    std::lock_guard<std::mutex> lock(board_.mutex_);
    board_.ends_[rank_].alarm_s = now_s() + delay_us * 1e-6;
    board_.changed_.notify_all();
  }

  void doze(int timeout_us) override {
    std::unique_lock<std::mutex> lock(board_.mutex_);
    auto& end = board_.ends_[rank_];
    sleep(lock, timeout_us,
          [&] { return !end.hushed && (end.woken || (!end.frozen && !end.inbox.empty())); });
  }

  void hush(bool hushed) override {
    std::lock_guard<std::mutex> lock(board_.mutex_);
    board_.ends_[rank_].hushed = hushed;
    board_.changed_.notify_all();
  }

 private:
  // Until ready(), the timeout or the alarm, whichever comes first.
  template <class Ready>
  void sleep(std::unique_lock<std::mutex>& lock, int timeout_us, Ready&& ready) {
    auto& end = board_.ends_[rank_];
    const double limit_s = timeout_us < 0 ? 1e18 : now_s() + timeout_us * 1e-6;
    while (!ready()) {
      const double now = now_s();
      if (end.alarm_s > 0 && now >= end.alarm_s) {
        end.alarm_s = 0;
        end.woken = true;
        continue;
      }
      if (now >= limit_s) return;
      double wait_s = limit_s - now;
      if (end.alarm_s > 0) wait_s = std::min(wait_s, end.alarm_s - now);
      board_.changed_.wait_for(lock, std::chrono::duration<double>(std::min(wait_s, 3600.0)));
    }
  }

  LoopbackSwitchboard& board_;
  const int rank_;
};

std::unique_ptr<Channel> LoopbackSwitchboard::connect(int rank) {
  return std::make_unique<LoopbackChannel>(*this, rank);
}

void LoopbackSwitchboard::lose(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t peer = 0; peer < ends_.size(); ++peer) {
    const bool connected = static_cast<int>(peer) != rank && (peer == 0 || rank == 0);
    if (connected) ends_[peer].inbox.push_back({rank, true, {}});
  }
  changed_.notify_all();
}

void LoopbackSwitchboard::freeze(int rank, bool frozen) {
  std::lock_guard<std::mutex> lock(mutex_);
  ends_[rank].frozen = frozen;
  changed_.notify_all();
}

void LoopbackSwitchboard::starve(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  ends_[rank].starved = true;
}

}  // namespace bagua
