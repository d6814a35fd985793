#include "engine/door.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <string>
#include <utility>

#include "common/clock.h"
#include "engine/refusals.h"

namespace bagua {
namespace {

// Pending requests of this size are worth an exchange of their own without waiting for company.
constexpr int64_t kEagerNbytes = 4 << 20;
// How long a small request waits for company if nobody waits for it.
constexpr int kCompanyUs = 500;
// A pause of this length between small requests means that no more are coming.
constexpr double kPauseUs = 50;
constexpr int kAnotherLookUs = 200;  // at requests that still pour in

}  // namespace

Door::Door(const Station& station) : at_(station) {
  std::vector<int>& world = sets_[0].ranks;
  for (int rank = 0; rank < at_.size; ++rank) world.push_back(rank);
}

// ---- any thread ------------------------------------------------------------------------------

void Door::refuse_in_child() const {
  if (in_child_)
    throw UsageError(
        "bagua is not initialized in this process, a child that was forked after init()");
}

Door::Set& Door::set_at(int32_t id) {
  const auto it = sets_.find(id);
  if (it == sets_.end())
    throw UsageError("there is no process set " + std::to_string(id) +
                     " (never added, or removed)");
  return it->second;
}

std::vector<int> Door::ranks_of(int32_t set) {
  std::lock_guard<std::mutex> lock(mutex_);
  return set_at(set).ranks;
}

FailurePtr Door::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

HandlePtr Door::submit(RequestPtr request, Urgency urgency) {
  refuse_in_child();
  const std::string problem = refuse(*request);
  if (request->device && request->starts.empty() && request->refusal.empty())
    throw InternalError(request->label() + " does not say from when on its values are there");
  for (const Device::Mark& start : request->starts)
    request->description.captured |= request->device->captured(start);
  HandlePtr handle = request->handle;
  bool first, wake;
  int64_t nbytes = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) throw_failure(*failure_);
    if (stopping_)
      throw UsageError(
          "bagua has been shut down; call init() first, and make anew what was made before, as "
          "optimizers");
    Set& set = set_at(request->set);
    if (std::find(set.ranks.begin(), set.ranks.end(), at_.rank) == set.ranks.end())
      throw UsageError("rank " + std::to_string(at_.rank) + " is not in process set " +
                       std::to_string(request->set));
    if (request->refusal.empty())
      request->refusal = problem.empty() ? refuse_in(*request, set.ranks, at_.size) : problem;
    if (request->name.empty()) {
      request->seq = request->description.kind == OpKind::kJoin ? 0 : set.next_seq++;
    } else if (request->refusal.empty() ? !set.names.insert(request->name).second
                                        : set.names.count(request->name) > 0) {
      throw UsageError("'" + request->name +
                       "' is already in flight; wait for its handle first or use another name");
    }
    first = submissions_.empty();
    if (urgency != Urgency::kWaited) nbytes = submitted_nbytes_ += nbytes_of(request->description);
    submissions_.push_back(request);
    urgent_ = urgent_ || !request->refusal.empty() || urgency == Urgency::kNow ||
              nbytes >= kEagerNbytes || !at_.config.inline_drive;
    wake = urgent_;
    if (urgency == Urgency::kSoon) submitted_s_ = now_s();
  }
  const bool refused = !request->refusal.empty();
  if (wake) {
    at_.channel->wake();
  } else if (urgency == Urgency::kSoon && first) {
    at_.channel->wake_after(kCompanyUs);
  }
  if (refused && !request->for_good) throw UsageError(request->label() + ": " + request->refusal);
  return handle;
}

Door::Wait Door::wait(const Handle& handle, double deadline_s, const Interrupted& interrupted) {
  if (handle.done()) return Wait::kDone;
  refuse_in_child();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!handle.done()) {
    const double rest_s = deadline_s - now_s();
    if (rest_s <= 0) return Wait::kLate;
    if (at_.config.inline_drive && !driven_ && !stopping_) {
      driven_ = true;
      lock.unlock();
      at_.channel->hush(true);
      caller_drives_ = true;
      interrupted_ = interrupted ? &interrupted : nullptr;
      return Wait::kDrive;
    }
    if (!submissions_.empty()) at_.channel->wake();  // whoever drives may be asleep
    ++waiting_;
    changed_.wait_for(lock, std::chrono::duration<double>(std::min(rest_s, 1.0)));
    --waiting_;
  }
  return Wait::kDone;
}

bool Door::wait_values(const Handle& handle, double timeout_s) {
  refuse_in_child();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!submissions_.empty()) at_.channel->wake();
  ++waiting_;
  const bool there = changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                       [&] { return handle.has_values(); });
  --waiting_;
  return there;
}

void Door::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  at_.channel->wake();
}

void Door::end_now() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = ends_now_ = true;
  }
  at_.channel->wake();
}

bool Door::wait_stopped(double timeout_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                           [&] { return stopped_; });
}

// ---- who drives ------------------------------------------------------------------------------

Door::Turn Door::take_over(const std::function<void()>& look) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return !driven_ || asks_; });
  if (driven_) {
    look_after(lock, look);
    return Turn::kLent;
  }
  driven_ = true;
  caller_drives_ = false;
  return stopping_ ? Turn::kStop : Turn::kDrive;
}

bool Door::hand_back(Turn turn, bool through) {
  std::lock_guard<std::mutex> lock(mutex_);
  driven_ = false;
  stopped_ = through;
  changed_.notify_all();
  return due() || (stopping_ && turn != Turn::kStop);
}

// The coordination thread takes over. What came last may have woken this thread instead.
void Door::hand_on(bool more) {
  interrupted_ = nullptr;
  at_.channel->hush(false);
  std::lock_guard<std::mutex> lock(mutex_);
  driven_ = false;
  if (more || stopping_ || !submissions_.empty()) at_.channel->wake();
  changed_.notify_all();
}

// Notes what comes, and answers, until the thread that drives is back in its exchange.
void Door::look_after(std::unique_lock<std::mutex>& lock, const std::function<void()>& look) {
  lent_ = true;
  while (asks_ && !trouble_) {
    lock.unlock();
    std::exception_ptr trouble;
    try {
      look();
    } catch (...) {
      trouble = std::current_exception();
    }
    lock.lock();
    trouble_ = trouble;
  }
  lent_ = false;
  changed_.notify_all();
  changed_.wait(lock, [&] { return !asks_; });
}

bool Door::ask() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    asks_ = true;
    trouble_ = nullptr;
  }
  changed_.notify_all();
  at_.channel->hush(false);
  at_.channel->wake();
  const bool interrupted = (*interrupted_)();
  std::unique_lock<std::mutex> lock(mutex_);
  asks_ = false;
  at_.channel->wake();
  changed_.notify_all();
  changed_.wait(lock, [&] { return !lent_; });
  at_.channel->hush(true);
  if (trouble_) std::rethrow_exception(std::exchange(trouble_, nullptr));
  return interrupted;
}

bool Door::has_submissions() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !submissions_.empty();
}

bool Door::stopping() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stopping_;
}

bool Door::ends_now() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ends_now_;
}

// Whether what was submitted should be looked at now. While small requests still pour in and nobody
// waits for them, the next ones are worth a moment: they may share an exchange. Under mutex_.
bool Door::due() const {
  if (submissions_.empty()) return false;
  return urgent_ || stopping_ || waiting_ > 0 || now_s() - submitted_s_ > kPauseUs * 1e-6;
}

bool Door::take(std::vector<RequestPtr>& into, int64_t least_nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (submissions_.empty() || submitted_nbytes_ < least_nbytes) return false;
  if (!caller_drives_ && !due()) {
    at_.channel->wake_after(kAnotherLookUs);
    return false;
  }
  append_submissions(into);
  return true;
}

void Door::take_rest(std::vector<RequestPtr>& into) {
  std::lock_guard<std::mutex> lock(mutex_);
  append_submissions(into);
}

// Under mutex_.
void Door::append_submissions(std::vector<RequestPtr>& into) {
  into.insert(into.end(), std::make_move_iterator(submissions_.begin()),
              std::make_move_iterator(submissions_.end()));
  submissions_.clear();
  submitted_nbytes_ = 0;
  urgent_ = false;
}

void Door::announce(const std::vector<RequestPtr>& requests) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const RequestPtr& request : requests)
    request->handle->has_values_.store(true, std::memory_order_release);
  if (waiting_ > 0) changed_.notify_all();
}

void Door::complete(const std::vector<RequestPtr>& requests, const FailurePtr& failure) {
  for (const RequestPtr& request : requests) {
    if (failure) request->handle->outputs.clear();
    request->handle->failure_ = failure;
    if (!failure && request->handle->device()) request->handle->keepalive_ = request->keepalive;
    request->keepalive.reset();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const RequestPtr& request : requests) {
    const auto set = sets_.find(request->set);
    if (!request->name.empty() && set != sets_.end()) set->second.names.erase(request->name);
    request->handle->done_.store(true, std::memory_order_release);
  }
  if (waiting_ > 0) changed_.notify_all();
}

bool Door::fail(const FailurePtr& failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) return false;
  failure_ = failure;
  return true;
}

void Door::add_set(int32_t id, const std::vector<int>& ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  sets_[id].ranks = ranks;
}

void Door::remove_set(int32_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  sets_.erase(id);
}

void Door::count_past(int32_t set, uint64_t seq) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t& next = sets_[set].next_seq;
  next = std::max(next, seq + 1);
}

}  // namespace bagua
