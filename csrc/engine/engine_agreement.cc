// What a rank tells rank 0, and what rank 0 tells everyone.
#include <algorithm>
#include <functional>
#include <utility>

#include "common/clock.h"
#include "engine/engine.h"

namespace bagua {
namespace {
constexpr int kAnotherLookUs = 200;  // at requests that still pour in
}

bool Engine::take_submissions(int64_t least_nbytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (submissions_.empty() || submitted_nbytes_ < least_nbytes) return false;
    if (!caller_drives_ && !due()) {
      channel_->wake_after(kAnotherLookUs);
      return false;
    }
    taken_.swap(submissions_);
    submitted_nbytes_ = 0;
    urgent_ = false;
  }
  for (const RequestPtr& request : taken_) {
    if (request->device) device_ = request->device;
    report(request);
  }
  taken_.clear();
  send_reports();
  return true;
}

// During an exchange. Small requests once only: what comes later may share an exchange with what
// comes then. Large ones may begin before this exchange ends.
void Engine::take_ahead() {
  if (decisions_.empty()) took_ahead_ |= take_submissions(took_ahead_ ? kLoneNbytes : 0);
}

void Engine::report(const RequestPtr& request) {
  const auto it = sets_.find(request->set);
  const Key key{request->name, request->seq};
  if (it == sets_.end() || it->second.removed) return turn_away(request);
  Set& set = it->second;
  Report& report = set.report;
  if (!request->refusal.empty()) {
    report.full.push_back({key, "", request->refusal, request->for_good});
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

// Another thread has submitted it while its process set was being removed.
void Engine::turn_away(const RequestPtr& request) {
  if (!request->refusal.empty()) return;
  ++open_count_;
  complete({request},
           make_failure(ErrorKind::kUsage,
                        "process set " + std::to_string(request->set) + " has been removed"));
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
  if (taken.empty() && decisions_.empty() && tasks_.empty() && under_way_.empty() &&
      ledger_->has_background())
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

void Engine::accept_next() {
  const Decision decision = std::move(decisions_.front());
  decisions_.pop_front();
  const auto it = sets_.find(decision.set);
  if (it == sets_.end()) return;  // removed, and nothing of this rank was open
  Set& set = it->second;
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
    if (set.joining && rejection.key.seq > 0) count_past(decision.set, rejection.key.seq);
    if (std::find(meant.begin(), meant.end(), rank_) == meant.end()) continue;
    if (stopping_now_) continue;  // it hears that it was this rank that left
    const auto known = set.by_name.find(rejection.key.name);
    const int32_t id = rejection.key.seq == 0 && known != set.by_name.end() ? known->second : -1;
    if (const RequestPtr request = take_open(set, id, rejection.key))
      complete({request}, make_failure(rejection.kind, rejection.text));
  }
  line_up(decision.set, decision.agreed, forgotten);
  if (decision.last_joined >= 0)
    tasks_.push_back(Task{decision.set, 0, {}, 0, decision.last_joined});
  if (!tasks_.empty()) tasks_.back().last = true;
}

// What was agreed on, in the order in which it is exchanged.
void Engine::line_up(int32_t id, const std::vector<Decision::Agreed>& agreed,
                     std::vector<Entry>& forgotten) {
  Set& set = sets_.at(id);
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
    if (!request) {
      request = stand_in(set, entry);
      count_past(id, item.seq);
    }
    request->round = entry.rounds++;
    agreed_.push_back(request);
    candidates.push_back({&entry.description, entry.nbytes});
  }
  for (const auto& group : schedule(candidates, config_.fusion_nbytes)) {
    Task& task = tasks_.emplace_back(Task{id, set.track});
    set.track = (set.track + 1) % kTracks;
    for (const int i : group) {
      task.requests.push_back(agreed_[static_cast<size_t>(i)]);
      task.nbytes += candidates[static_cast<size_t>(i)].nbytes;
    }
  }
  agreed_.clear();
}

// Process sets that were removed, once rank 0 has answered to what was open in them.
void Engine::forget_removed() {
  const auto over = [&](int32_t id) {
    const Set& set = sets_.at(id);
    const auto is_open = [](const Entry& entry) { return entry.open != nullptr; };
    return set.open.empty() && !set.joining &&
           std::none_of(set.entries.begin(), set.entries.end(), is_open);
  };
  const auto rest = std::stable_partition(removed_.begin(), removed_.end(), std::not_fn(over));
  std::for_each(rest, removed_.end(), [&](int32_t id) { sets_.erase(id); });
  removed_.erase(rest, removed_.end());
}

RequestPtr Engine::take_open(Set& set, int32_t id, const Key& key) {
  if (key.is_join()) return std::exchange(set.joining, nullptr);
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

}  // namespace bagua
