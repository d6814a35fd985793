// What a rank tells rank 0, what rank 0 tells everyone, and the carrying out of it.
#include <algorithm>
#include <utility>

#include "common/clock.h"
#include "engine/engine.h"

namespace bagua {
namespace {
constexpr int kAnotherLookUs = 200;  // at requests that still pour in
}

bool Engine::take_submissions() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (submissions_.empty()) return false;
    if (!caller_drives_ && !due()) {
      channel_->wake_after(kAnotherLookUs);
      return false;
    }
    taken_.swap(submissions_);
    submitted_nbytes_ = 0;
    urgent_ = false;
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

void Engine::decide(bool everything) {
  std::vector<Decision> taken = ledger_->take(everything);
  // What runs in the background does so one by one, when there is nothing else.
  if (taken.empty() && decisions_.empty() && exchanging_.empty() && ledger_->has_background())
    taken.push_back(ledger_->take_background());
  for (Decision& decision : taken) {
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

void Engine::apply(const Decision& decision) {
  Set& set = sets_.at(decision.set);
  std::vector<Entry> forgotten;
  for (const auto& definition : decision.definitions) {
    if (definition.id == Decision::kForgotten) {
      Entry entry{definition.name, Description::decode(definition.description), 0, 0, nullptr};
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
    entry.rounds = 0;
    if (entry.name.empty()) {
      set.by_bytes[definition.description] = definition.id;
    } else {
      set.by_name[entry.name] = definition.id;
    }
  }
  for (const auto& rejection : decision.rejections) {
    const auto& meant = rejection.ranks;
    if (std::find(meant.begin(), meant.end(), rank_) == meant.end()) continue;
    if (stopping_now_) continue;  // it hears that it was this rank that left
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
                        std::vector<Entry>& forgotten) {
  Set& set = sets_.at(id);
  std::vector<RequestPtr> requests;
  std::vector<Candidate> candidates;
  auto next_forgotten = forgotten.begin();
  for (const auto& item : agreed) {
    Entry& entry = item.id == Decision::kForgotten ? *next_forgotten++
                                                   : set.entries[static_cast<size_t>(item.id)];
    RequestPtr request = take_open(set, item.id, {item.seq ? "" : entry.name, item.seq});
    if (!request && !set.joining)
      throw InternalError("the ranks agreed on '" + entry.name + "' (" +
                          kind_name(entry.description.kind) + "), which rank " +
                          std::to_string(rank_) + " has not asked for");
    if (!request) request = stand_in(set, entry);
    request->round = entry.rounds++;
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
  Staging* staging = staging_for(requests);
  const Description& d = requests[0]->description;
  if (staging) staging->begin(requests, group, d.kind != OpKind::kBroadcast || d.root == rank_);
  run_exchange(
      requests, group, set.ranks,
      {*scratch_, config_.allreduce, config_.fusion_nbytes, caller_drives_ ? crew_.get() : nullptr,
       [this](const Collective& row, const Job& job) { tell_choice(row, job); },
       [this, &requests, staging] {
         if (staging) staging->end();
         announce(requests);
       },
       staging});
  if (staging) staging->end();
  sent_nbytes_ += group.sent_nbytes();
  touched_nbytes_ += group.touched_nbytes();
  ++exchange_count_;
  complete(requests, nullptr);
}

// Null if all are in the host's memory.
Staging* Engine::staging_for(const std::vector<RequestPtr>& requests) {
  Device* device = nullptr;
  for (const RequestPtr& request : requests)
    if (request->device) device = request->device;
  if (!device) return nullptr;
  if (!staging_) {
    const auto warn = [this](const std::string& text) { log_.write(LogLevel::kWarning, text); };
    staging_ = std::make_unique<Staging>(*device, arenas(), warn);
    log_.write(LogLevel::kInfo, "tensors on " + device->name() + " go through the host's memory");
  }
  return staging_.get();
}

// Who waits for the values may go on.
void Engine::announce(const std::vector<RequestPtr>& requests) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const RequestPtr& request : requests)
    request->handle->has_values_.store(true, std::memory_order_release);
  if (waiting_ > 0) changed_.notify_all();
}

// What was chosen is told once.
void Engine::tell_choice(const Collective& row, const Job& job) {
  if (!chosen_.insert(&row).second || !log_.enabled(LogLevel::kInfo)) return;
  log_.write(LogLevel::kInfo, std::string(kind_name(row.kind)) + " over " +
                                  std::to_string(job.group.size()) + " ranks uses " + row.name);
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
    char* in = memory->back().data();
    // Its result may come while the zeros still are under way.
    if (entry.description.kind == OpKind::kReducescatter) memory->emplace_back(nbytes);
    request->parts.push_back({in, memory->back().data()});
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
    if (!failure && request->handle->device()) request->handle->keepalive_ = request->keepalive;
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
