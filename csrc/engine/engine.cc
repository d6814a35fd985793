#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/clock.h"
#include "common/memory.h"
#include "engine/engine_waiter.h"

namespace bagua {
namespace {

// Pending requests of this size are worth an exchange of their own without waiting for company.
constexpr int64_t kEagerNbytes = 4 << 20;
// How long a small request waits for company if nobody waits for it.
constexpr int kCompanyUs = 500;
// A pause of this length between small requests means that no more are coming.
constexpr double kPauseUs = 50;
// How often a waiting engine looks at the clock: stalls and silent ranks.
constexpr int kTickUs = 1000000;
constexpr int kEndUs = 1000;  // between looks at what devices still have to do

}  // namespace

Engine::Engine(const Config& config, std::unique_ptr<Transport> transport,
               std::unique_ptr<Channel> channel, std::vector<std::string> names)
    : config_(config),
      allreduce_(config.allreduce),
      transport_(std::move(transport)),
      channel_(std::move(channel)),
      names_(std::move(names)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      log_(rank_, config_.log_level),
      ledger_(rank_ == 0 ? std::make_unique<Ledger>(size_) : nullptr),
      liveness_(*channel_, rank_, size_, config_.peer_timeout_s),
      patience_(config_.spin_us),
      waiter_(std::make_unique<EngineWaiter>(*this, config_.spin_us)),
      crew_(config_.helpers > 0
                ? std::make_unique<Crew>(config_.helpers,
                                         [this] { return caller_drives_ || waiting_ > 0; })
                : nullptr),
      left_(static_cast<size_t>(size_)) {
  Set& world = sets_[0];
  for (int r = 0; r < size_; ++r) world.ranks.push_back(r);
  world.me = rank_;
  doors_[0].ranks = world.ranks;
  thread_ = std::thread([this] { coordinate(); });
}

Engine::~Engine() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = abandoned_ = true;
  }
  channel_->wake();
  thread_.join();
}

std::string Engine::name_of(int rank) const {
  const auto r = static_cast<size_t>(rank);
  return "rank " + std::to_string(rank) + (r < names_.size() ? " (" + names_[r] + ")" : "");
}

FailurePtr Engine::failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

std::shared_ptr<Arenas> Engine::arenas() const {
  Node* node = transport_->node();
  return node ? node->arenas() : nullptr;
}

std::shared_ptr<char> Engine::allocate(size_t nbytes) {
  if (const auto arenas = this->arenas()) return arenas->allocate(nbytes);
  const auto memory = allocate_lines(nbytes);
  std::memset(memory.get(), 0, nbytes);
  return memory;
}

std::vector<int> Engine::nodes_of(int32_t set) {
  std::vector<int> nodes;
  for (const int rank : ranks_of(set)) nodes.push_back(transport_->node_of(rank));
  return nodes;
}

// Nodes of several ranks each work in memory that all of the node see, while they send.
bool Engine::exchanges_anywhere(int32_t set) {
  return !on_shared_nodes(*transport_, ranks_of(set));
}

std::vector<int> Engine::ranks_of(int32_t set) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = doors_.find(set);
  if (it == doors_.end())
    throw UsageError("there is no process set " + std::to_string(set) +
                     " (never added, or removed)");
  return it->second.ranks;
}

// ---- any thread ------------------------------------------------------------------------------

void Engine::refuse_in_child() const {
  if (in_child_)
    throw UsageError(
        "bagua is not initialized in this process, a child that was forked after init()");
}

HandlePtr Engine::submit(RequestPtr request, Urgency urgency) {
  refuse_in_child();
  const std::string problem = refuse(*request);
  for (const Device::Mark& start : request->starts)
    request->description.captured |= request->device->captured(start);
  HandlePtr handle = request->handle;
  bool first, wake;
  int64_t nbytes = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) throw_failure(*failure_);
    if (stopping_) throw UsageError("bagua has been shut down; call init() first");
    const auto it = doors_.find(request->set);
    if (it == doors_.end())
      throw UsageError("there is no process set " + std::to_string(request->set) +
                       " (never added, or removed)");
    Door& door = it->second;
    if (std::find(door.ranks.begin(), door.ranks.end(), rank_) == door.ranks.end())
      throw UsageError("rank " + std::to_string(rank_) + " is not in process set " +
                       std::to_string(request->set));
    if (request->refusal.empty())
      request->refusal = problem.empty() ? refuse_in(*request, door.ranks) : problem;
    if (request->name.empty()) {
      request->seq = request->description.kind == OpKind::kJoin ? 0 : door.next_seq++;
    } else if (request->refusal.empty() ? !door.names.insert(request->name).second
                                        : door.names.count(request->name) > 0) {
      throw UsageError("'" + request->name +
                       "' is already in flight; wait for its handle first or use another name");
    }
    first = submissions_.empty();
    if (urgency != Urgency::kWaited) nbytes = submitted_nbytes_ += nbytes_of(request->description);
    submissions_.push_back(request);
    urgent_ = urgent_ || !request->refusal.empty() || urgency == Urgency::kNow ||
              nbytes >= kEagerNbytes || !config_.inline_drive;
    wake = urgent_;
    if (urgency == Urgency::kSoon) submitted_s_ = now_s();
  }
  const bool refused = !request->refusal.empty();
  if (wake) {
    channel_->wake();
  } else if (urgency == Urgency::kSoon && first) {
    channel_->wake_after(kCompanyUs);
  }
  if (refused && !request->for_good) throw UsageError(request->label() + ": " + request->refusal);
  return handle;
}

bool Engine::wait(const Handle& handle, double timeout_s, const Interrupted& interrupted) {
  if (handle.done()) return true;
  refuse_in_child();
  const double deadline_s = now_s() + timeout_s;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!handle.done()) {
    const double left_s = deadline_s - now_s();
    if (left_s <= 0) return false;
    if (config_.inline_drive && !driven_ && !stopping_) {
      driven_ = true;
      lock.unlock();
      channel_->hush(true);
      caller_drives_ = true;
      interrupted_ = interrupted ? &interrupted : nullptr;
      drive(&handle, deadline_s);
      interrupted_ = nullptr;
      const bool more = !decisions_.empty() || anything_open() || on_device() ||
                        (ledger_ && ledger_->has_background());
      channel_->hush(false);
      lock.lock();
      driven_ = false;
      // The coordination thread takes over. What came last may have woken this thread instead.
      if (more || stopping_ || !submissions_.empty()) channel_->wake();
      changed_.notify_all();
    } else {
      if (!submissions_.empty()) channel_->wake();  // whoever drives may be asleep
      ++waiting_;
      changed_.wait_for(lock, std::chrono::duration<double>(std::min(left_s, 1.0)));
      --waiting_;
    }
  }
  return true;
}

bool Engine::wait_values(const Handle& handle, double timeout_s) {
  refuse_in_child();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!submissions_.empty()) channel_->wake();
  ++waiting_;
  const bool there = changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                       [&] { return handle.has_values(); });
  --waiting_;
  return there;
}

void Engine::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  channel_->wake();
}

bool Engine::wait_stopped(double timeout_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                           [&] { return stopped_; });
}

// ---- driving ---------------------------------------------------------------------------------

void Engine::coordinate() {
  ::pthread_setname_np(::pthread_self(), "bagua");  // as top and profilers show it
  for (int doze_us = -1;;) {
    channel_->doze(doze_us);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !driven_ || asks_; });
    if (driven_) {
      stand_in_for_caller(lock);
      continue;
    }
    driven_ = true;
    const bool stopping = stopping_;
    lock.unlock();
    caller_drives_ = false;
    drive(nullptr, 0);
    const bool through = stopping && try_stop();
    const bool watchful = anything_open() || on_device() || stopping ||
                          (nccl_ && nccl_->has_left()) ||
                          (ledger_ && (ledger_->any_open() || liveness_.asked(now_s())));
    doze_us = watchful ? (stopping && !stopping_now_ && nccl_ ? kEndUs : kTickUs) : -1;
    lock.lock();
    driven_ = false;
    stopped_ = through;
    // The wake-up of what came after the last look was perhaps read by that look.
    const bool background = ledger_ && !failure_ && ledger_->has_background();
    if (due() || stopping_ != stopping || background) doze_us = 0;
    changed_.notify_all();
    if (through) return;
  }
}

// Notes what comes, and answers, until the thread that drives is back in its exchange.
void Engine::stand_in_for_caller(std::unique_lock<std::mutex>& lock) {
  lent_ = true;
  while (asks_ && !trouble_) {
    lock.unlock();
    std::exception_ptr trouble;
    try {
      receive(kTickUs);
      tick();
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

// Whether what was submitted should be looked at now. While small requests still pour in and nobody
// waits for them, the next ones are worth a moment: they may share an exchange. Under mutex_.
bool Engine::due() {
  if (submissions_.empty()) return false;
  return urgent_ || stopping_ || waiting_ > 0 || now_s() - submitted_s_ > kPauseUs * 1e-6;
}

void Engine::drive(const Handle* until, double deadline_s) {
  double idle_since_s = now_s();
  for (;;) {
    if (until && until->done()) return;
    int timeout_us = 0;
    const double now = now_s();
    if (until && now > deadline_s) return;
    if (until && now - idle_since_s > patience_.spin_us() * 1e-6)
      timeout_us = static_cast<int>(std::min((deadline_s - now) * 1e6, double{kTickUs}));
    if (turn(timeout_us)) {
      if (until && heard_s_ > idle_since_s) patience_.waited((heard_s_ - idle_since_s) * 1e6);
      idle_since_s = now_s();
    } else {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!until || stopping_) return;  // stopping is the coordination thread's work
    }
  }
}

bool Engine::turn(int timeout_us) {
  if (failure()) {
    fail_everything(failure());
    inbox_.clear();
    channel_->receive(timeout_us, inbox_);
    return false;
  }
  try {
    const bool busy = !under_way_.empty() || !tasks_.empty();
    if (!busy) forget_removed();
    bool progressed = !busy && take_submissions();
    receive(progressed || busy || !decisions_.empty() ? 0 : timeout_us);
    if (!busy && !decisions_.empty()) {
      accept_next();
      progressed = true;
    }
    // All of what was agreed on at once: who has got the first of it will soon wait for the rest,
    // and handing that over to another thread costs more. No further: others' may never end.
    if (!under_way_.empty() || !tasks_.empty()) {
      while (!take_task()) continue;
      progressed = true;
    }
    tick();
    return progressed;
  } catch (const Verdict& verdict) {
    poison(make_failure(verdict.kind(), verdict.what()));
  } catch (const Error& error) {
    const bool mine = error.kind() == ErrorKind::kUsage;  // and too late to go on after it
    poison(verdict_on(make_failure(
        error.kind(), error.what() + std::string(mine ? "; that ended the exchanges" : ""))));
  } catch (const std::exception& error) {
    poison(make_failure(ErrorKind::kInternal, error.what()));
  }
  return true;
}

// Also called from inside an exchange that waits: it must only take note, never exchange.
void Engine::receive(int timeout_us) {
  if (ledger_) decide();
  inbox_.clear();
  channel_->receive(timeout_us, inbox_);
  if (!inbox_.empty()) heard_s_ = now_s();
  for (const Message& message : inbox_) handle(message);
  if (ledger_) decide();
}

void Engine::handle(const Message& message) {
  if (message.lost)
    return lose(message.from, "is gone: its process ended without shutting bagua down");
  Reader r(message.bytes);
  const auto type = r.get<MessageType>();
  if (liveness_.handle(message, type, now_s())) {
    // Somebody waits for long. MPI may hold back a message of ours until we call it again.
    if (under_way_.empty()) transport_->progress();
    return;
  }
  switch (type) {
    case MessageType::kReport:
      return ledger_->report(message.from, Report::decode(r), now_s());
    case MessageType::kDecision:
      return decisions_.push_back(Decision::decode(r));
    case MessageType::kBye:
      // What was decided with the leaver must reach it ahead of the answer.
      if (ledger_) {
        decide(/*everything=*/true);
        channel_->send(message.from, text_message(MessageType::kBye));
        ledger_->leave(message.from);
      }
      left_[static_cast<size_t>(message.from)] = true;
      return liveness_.forget(message.from);
    case MessageType::kFault:
      throw Verdict(std::string(r.get_string()));
    default:
      throw InternalError("unknown control message from rank " + std::to_string(message.from));
  }
}

}  // namespace bagua
