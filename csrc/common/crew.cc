#include "common/crew.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "common/denormals.h"

namespace bagua {

Crew::Crew(int helpers, std::function<bool()> idle) : idle_(std::move(idle)) {
  for (int i = 0; i < helpers; ++i) helpers_.emplace_back([this] { help(); });
}

Crew::~Crew() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  wanted_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Crew::share(int64_t count, int64_t piece, const Work& work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    count_ = count;
    piece_ = piece;
    next_.store(0, std::memory_order_relaxed);
    work_ = &work;
    ++number_;
  }
  wanted_.notify_all();
  take_pieces(work);
  std::unique_lock<std::mutex> lock(mutex_);
  work_ = nullptr;  // whoever wakes up now is too late
  all_left_.wait(lock, [&] { return busy_ == 0; });
}

void Crew::take_pieces(const Work& work) {
  for (;;) {
    const int64_t begin = next_.fetch_add(piece_, std::memory_order_relaxed);
    if (begin >= count_) return;
    work(begin, std::min(piece_, count_ - begin));
  }
}

void Crew::help() {
  ::pthread_setname_np(::pthread_self(), "bagua helper");
  const Denormals denormals;
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [&] { return ends_ || (work_ && number_ != seen); });
    if (ends_) return;
    seen = number_;
    const Work& work = *work_;
    ++busy_;
    joined_.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    take_pieces(work);
    lock.lock();
    if (--busy_ == 0) all_left_.notify_all();
  }
}

}  // namespace bagua
