#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "common/clock.h"
#include "engine/engine_waiter.h"

namespace bagua {
namespace {

// Pending requests of this size are worth an exchange of their own without waiting for company.
constexpr int64_t kEagerNbytes = 4 << 20;
// How long a small request waits for company if nobody waits for it.
constexpr int kCompanyUs = 500;
// How often a waiting engine looks at the clock: stalls and silent ranks.
constexpr int kTickUs = 1000000;

int64_t nbytes_of(const Description& description) {
  int64_t nbytes = 0;
  for_each_tensor(description, [&](DType dtype, const int64_t* dimensions, size_t ndim) {
    nbytes += std::max<int64_t>(count_of(dimensions, ndim), 0) *
              static_cast<int64_t>(dtype_nbytes(dtype));
  });
  return nbytes;
}

}  // namespace

Engine::Engine(const Config& config, std::unique_ptr<Transport> transport,
               std::unique_ptr<Channel> channel, std::vector<std::string> names)
    : config_(config),
      transport_(std::move(transport)),
      channel_(std::move(channel)),
      names_(std::move(names)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      log_(rank_, config_.log_level),
      ledger_(rank_ == 0 ? std::make_unique<Ledger>(size_) : nullptr),
      liveness_(*channel_, rank_, size_, config_.peer_timeout_s),
      waiter_(std::make_unique<EngineWaiter>(*this)),
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

std::vector<int> Engine::ranks_of(int32_t set) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = doors_.find(set);
  if (it == doors_.end())
    throw UsageError("there is no process set " + std::to_string(set) +
                     " (never added, or removed)");
  return it->second.ranks;
}

// ---- any thread ------------------------------------------------------------------------------

HandlePtr Engine::submit(RequestPtr request, Urgency urgency) {
  const std::string problem = refuse(*request);
  HandlePtr handle = request->handle;
  bool first;
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
    if (urgency == Urgency::kSoon) nbytes = submitted_nbytes_ += nbytes_of(request->description);
    submissions_.push_back(request);
  }
  const bool refused = !request->refusal.empty();
  if (refused || urgency == Urgency::kNow || nbytes >= kEagerNbytes || !config_.inline_drive) {
    channel_->wake();
  } else if (urgency == Urgency::kSoon && first) {
    channel_->wake_after(kCompanyUs);
  }
  if (refused) throw UsageError(request->label() + ": " + request->refusal);
  return handle;
}

bool Engine::wait(const Handle& handle, double timeout_s) {
  if (handle.done()) return true;
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
      drive(&handle, deadline_s);
      const bool more = anything_open();
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
  for (int doze_us = -1;;) {
    channel_->doze(doze_us);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !driven_; });
    driven_ = true;
    const bool stopping = stopping_;
    lock.unlock();
    caller_drives_ = false;
    drive(nullptr, 0);
    const bool through = stopping && try_stop();
    const bool watchful = anything_open() || stopping ||
                          (ledger_ && (ledger_->any_open() || liveness_.asked(now_s())));
    doze_us = watchful ? kTickUs : -1;
    lock.lock();
    driven_ = false;
    stopped_ = through;
    // The wake-up of what came after the last look was perhaps read by that look.
    if (!submissions_.empty() || stopping_ != stopping) doze_us = 0;
    changed_.notify_all();
    if (through) return;
  }
}

void Engine::drive(const Handle* until, double deadline_s) {
  double idle_since_s = now_s();
  for (;;) {
    if (until && until->done()) return;
    int timeout_us = 0;
    const double now = now_s();
    if (until && now > deadline_s) return;
    if (until && now - idle_since_s > config_.spin_us * 1e-6)
      timeout_us = static_cast<int>(std::min((deadline_s - now) * 1e6, double{kTickUs}));
    if (turn(timeout_us)) {
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
    bool progressed = take_submissions();
    receive(progressed || !decisions_.empty() ? 0 : timeout_us);
    while (!decisions_.empty()) {
      const Decision decision = std::move(decisions_.front());
      decisions_.pop_front();
      apply(decision);
      progressed = true;
    }
    tick();
    return progressed;
  } catch (const Verdict& verdict) {
    poison(make_failure(verdict.kind(), verdict.what()));
  } catch (const Error& error) {
    poison(verdict_on(make_failure(error.kind(), error.what())));
  } catch (const std::exception& error) {
    poison(make_failure(ErrorKind::kInternal, error.what()));
  }
  return true;
}

bool Engine::take_submissions() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (submissions_.empty()) return false;
    taken_.swap(submissions_);
    submitted_nbytes_ = 0;
  }
  for (const RequestPtr& request : taken_) report(sets_.at(request->set), request);
  taken_.clear();
  send_reports();
  return true;
}

void Engine::report(Set& set, const RequestPtr& request) {
  Report& report = set.report;
  const Key key{request->name, request->seq};
  if (!request->refusal.empty()) {
    report.full.push_back({key, "", request->refusal});
    return;
  }
  if (open_count_++ == 0) open_since_s_ = now_s();
  if (request->description.kind == OpKind::kJoin) {
    set.joining = request;
    report.join = true;
    return;
  }
  if (!request->name.empty()) {
    const auto known = set.by_name.find(request->name);
    if (known != set.by_name.end()) {
      Entry& entry = set.entries[static_cast<size_t>(known->second)];
      if (entry.description == request->description) {
        entry.open = request;
        report.ids.push_back(known->second);
        return;
      }
    }
    report.full.push_back({key, request->description.encode(), ""});
  } else {
    std::string bytes = request->description.encode();
    const auto known = set.by_bytes.find(bytes);
    if (known != set.by_bytes.end()) {
      report.unnamed.push_back({request->seq, known->second});
    } else {
      report.full.push_back({key, std::move(bytes), ""});
    }
  }
  set.open[key] = request;
}

void Engine::send_reports() {
  for (auto& [id, set] : sets_) {
    if (set.report.empty()) continue;
    set.report.set = id;
    if (ledger_) {
      ledger_->report(rank_, set.report, now_s());
    } else {
      Writer w;
      set.report.encode(w);
      channel_->send(0, w.bytes());
      ++message_count_;
    }
    set.report.clear();
  }
}

// Also called from inside an exchange that waits: it must only take note, never exchange.
void Engine::receive(int timeout_us) {
  if (ledger_) decide();
  inbox_.clear();
  channel_->receive(decisions_.empty() ? timeout_us : 0, inbox_);
  for (const Message& message : inbox_) handle(message);
  if (ledger_) decide();
}

void Engine::handle(const Message& message) {
  if (message.lost)
    return lose(message.from, "is gone: its process ended without shutting bagua down");
  Reader r(message.bytes);
  const auto type = r.get<MessageType>();
  if (liveness_.handle(message, type, now_s())) return;
  switch (type) {
    case MessageType::kReport:
      return ledger_->report(message.from, Report::decode(r), now_s());
    case MessageType::kDecision:
      return decisions_.push_back(Decision::decode(r));
    case MessageType::kBye:
      left_[static_cast<size_t>(message.from)] = true;
      liveness_.forget(message.from);
      return ledger_->leave(message.from);
    case MessageType::kFault:
      throw Verdict(std::string(r.get_string()));
    default:
      throw InternalError("unknown control message from rank " + std::to_string(message.from));
  }
}

void Engine::decide() {
  for (Decision& decision : ledger_->take()) {
    Writer w;
    decision.encode(w);
    bool mine = false;
    for (const int rank : ledger_->ranks_of(decision.set)) {
      if (rank == rank_) {
        mine = true;
      } else if (!left_[static_cast<size_t>(rank)]) {
        channel_->send(rank, w.bytes());
        ++message_count_;
      }
    }
    if (mine) decisions_.push_back(std::move(decision));
  }
}

// ---- carrying out decisions ------------------------------------------------------------------

void Engine::apply(const Decision& decision) {
  Set& set = sets_.at(decision.set);
  std::vector<Entry> forgotten;
  for (const auto& definition : decision.definitions) {
    if (definition.id == Decision::kForgotten) {
      Entry entry{definition.name, Description::decode(definition.description), 0, nullptr};
      entry.nbytes = nbytes_of(entry.description);
      forgotten.push_back(std::move(entry));
      continue;
    }
    if (static_cast<size_t>(definition.id) >= set.entries.size())
      set.entries.resize(static_cast<size_t>(definition.id) + 1);
    Entry& entry = set.entries[static_cast<size_t>(definition.id)];
    entry.name = definition.name;
    entry.description = Description::decode(definition.description);
    entry.nbytes = nbytes_of(entry.description);
    if (entry.name.empty()) {
      set.by_bytes[definition.description] = definition.id;
    } else {
      set.by_name[entry.name] = definition.id;
    }
  }
  for (const auto& rejection : decision.rejections) {
    const auto& meant = rejection.ranks;
    if (std::find(meant.begin(), meant.end(), rank_) == meant.end()) continue;
    const auto known = set.by_name.find(rejection.key.name);
    const int32_t id = rejection.key.seq == 0 && known != set.by_name.end() ? known->second : -1;
    if (const RequestPtr request = take_open(set, id, rejection.key))
      complete({request}, make_failure(rejection.kind, rejection.text));
  }
  run_agreed(decision.set, decision.agreed, forgotten);
  if (decision.last_joined >= 0) finish_join(decision.set, decision.last_joined);
}

RequestPtr Engine::take_open(Set& set, int32_t id, const Key& key) {
  if (id >= 0 && key.seq == 0) {
    Entry& entry = set.entries[static_cast<size_t>(id)];
    if (entry.open) return std::move(entry.open);
  }
  const auto it = set.open.find(key);
  if (it == set.open.end()) return nullptr;
  RequestPtr request = std::move(it->second);
  set.open.erase(it);
  return request;
}

void Engine::run_agreed(int32_t id, const std::vector<Decision::Agreed>& agreed,
                        const std::vector<Entry>& forgotten) {
  Set& set = sets_.at(id);
  std::vector<RequestPtr> requests;
  std::vector<Candidate> candidates;
  auto next_forgotten = forgotten.begin();
  for (const auto& item : agreed) {
    const Entry& entry = item.id == Decision::kForgotten
                             ? *next_forgotten++
                             : set.entries[static_cast<size_t>(item.id)];
    RequestPtr request = take_open(set, item.id, {item.seq ? "" : entry.name, item.seq});
    if (!request && !set.joining)
      throw InternalError("the ranks agreed on '" + entry.name + "' (" +
                          kind_name(entry.description.kind) + "), which rank " +
                          std::to_string(rank_) + " has not asked for");
    if (!request) request = stand_in(set, entry);
    requests.push_back(request);
    candidates.push_back({&entry.description, entry.nbytes});
  }
  exchanging_ = requests;
  for (const auto& group : schedule(candidates, config_.fusion_nbytes)) {
    std::vector<RequestPtr> together;
    for (const int i : group) together.push_back(requests[static_cast<size_t>(i)]);
    exchange(set, together);
  }
  exchanging_.clear();
}

void Engine::exchange(const Set& set, const std::vector<RequestPtr>& requests) {
  Group group(*transport_, *waiter_, set.ranks, set.me);
  run_special(*requests[0]);
  run_exchange(requests, group, set.ranks, {*scratch_, config_.allreduce, config_.fusion_nbytes});
  sent_nbytes_ += group.sent_nbytes();
  ++exchange_count_;
  complete(requests, nullptr);
}

// A rank that has joined contributes nothing: zeros, or no rows.
RequestPtr Engine::stand_in(const Set& set, const Entry& entry) {
  auto request = std::make_shared<Request>();
  request->description = entry.description;
  auto memory = std::make_shared<std::vector<std::vector<char>>>();
  for (const TensorInfo& tensor : tensors_of(entry.description)) {
    const auto nbytes =
        static_cast<size_t>(std::max<int64_t>(tensor.count(), 0)) * dtype_nbytes(tensor.dtype);
    memory->emplace_back(nbytes);
    request->parts.push_back({memory->back().data(), memory->back().data()});
    request->rows.push_back(0);
  }
  request->splits.assign(set.ranks.size(), 0);
  request->keepalive = memory;
  ++open_count_;
  return request;
}

void Engine::run_special(Request& request) {
  const Description& d = request.description;
  if (d.kind == OpKind::kAddProcessSet) {
    const int32_t id = next_set_++;
    Set& set = sets_[id];
    set.ranks.assign(d.layout.begin(), d.layout.end());
    const auto me = std::find(set.ranks.begin(), set.ranks.end(), rank_);
    set.me = me == set.ranks.end() ? -1 : static_cast<int>(me - set.ranks.begin());
    request.handle->value = id;
    std::lock_guard<std::mutex> lock(mutex_);
    doors_[id].ranks = set.ranks;
  } else if (d.kind == OpKind::kRemoveProcessSet) {
    std::lock_guard<std::mutex> lock(mutex_);
    doors_.erase(d.root);
  }
}

void Engine::finish_join(int32_t id, int last_joined) {
  Set& set = sets_.at(id);
  {
    // Ranks that joined early have made fewer unnamed requests: all start again together.
    std::lock_guard<std::mutex> lock(mutex_);
    doors_[id].next_seq = 1;
  }
  if (!set.joining) return;
  set.joining->handle->value = last_joined;
  complete({std::exchange(set.joining, nullptr)}, nullptr);
}

void Engine::complete(const std::vector<RequestPtr>& requests, const FailurePtr& failure) {
  open_since_s_ = now_s();
  open_count_ -= static_cast<int64_t>(requests.size());
  for (const RequestPtr& request : requests) {
    if (failure) request->handle->outputs.clear();
    request->handle->failure_ = failure;
    request->keepalive.reset();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const RequestPtr& request : requests) {
    const auto door = doors_.find(request->set);
    if (!request->name.empty() && door != doors_.end()) door->second.names.erase(request->name);
    request->handle->done_.store(true, std::memory_order_release);
  }
  if (waiting_ > 0) changed_.notify_all();
}

}  // namespace bagua
