#include "engine/agreement.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "common/clock.h"
#include "engine/schedule.h"

namespace bagua {

Agreement::Agreement(const Station& station, Door& door)
    : at_(station),
      door_(door),
      ledger_(at_.rank == 0 ? std::make_unique<Ledger>(at_.size) : nullptr),
      left_(static_cast<size_t>(at_.size)),
      traffic_(static_cast<size_t>(at_.size)) {
  Set& world = sets_[0];
  for (int rank = 0; rank < at_.size; ++rank) world.ranks.push_back(rank);
  world.me = at_.rank;
}

// ---- what others hear ------------------------------------------------------------------------

bool Agreement::take_submissions(int64_t least_nbytes) {
  if (!door_.take(taken_, least_nbytes)) return false;
  for (const RequestPtr& request : taken_) {
    if (request->device) device_ = request->device;
    report(request);
  }
  taken_.clear();
  send_reports();
  return true;
}

void Agreement::report(const RequestPtr& request) {
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
void Agreement::turn_away(const RequestPtr& request) {
  if (!request->refusal.empty()) return;
  ++open_count_;
  complete({request},
           make_failure(ErrorKind::kUsage,
                        "process set " + std::to_string(request->set) + " has been removed"));
}

void Agreement::send_reports() {
  for (auto& [id, set] : sets_) {
    if (set.report.empty()) continue;
    set.report.set = id;
    if (ledger_) {
      ledger_->report(at_.rank, set.report, now_s());
    } else {
      Writer w;
      set.report.encode(w);
      at_.channel->post({0}, w.bytes());
      ++traffic_[0].reports;
      ++message_count_;
    }
    set.report.clear();
  }
}

void Agreement::decide(bool idle) {
  if (!ledger_) return;
  std::vector<Decision> taken = ledger_->take();
  if (idle && taken.empty() && decisions_.empty() && ledger_->has_background())
    taken.push_back(ledger_->take_background());
  send(std::move(taken));
}

void Agreement::decide_everything() {
  if (ledger_) send(ledger_->take(/*everything=*/true));
}

void Agreement::send(std::vector<Decision> decisions) {
  for (Decision& decision : decisions) {
    Writer w;
    decision.encode(w);
    bool mine = false;
    std::vector<int> others;
    for (const int rank : ledger_->ranks_of(decision.set)) {
      if (rank == at_.rank) {
        mine = true;
      } else if (!has_left(rank)) {
        others.push_back(rank);
        ++traffic_[static_cast<size_t>(rank)].decisions;
      }
    }
    at_.channel->post(others, w.bytes());
    message_count_ += static_cast<int64_t>(others.size());
    if (mine) decisions_.push_back(std::move(decision));
  }
}

// ---- what this rank hears --------------------------------------------------------------------

void Agreement::hear(int from, MessageType type, Reader& r) {
  Traffic& traffic = traffic_[static_cast<size_t>(from)];
  if (type == MessageType::kReport) {
    ++traffic.reports;
    ledger_->report(from, Report::decode(r), now_s());
  } else {
    ++traffic.decisions;
    decisions_.push_back(Decision::decode(r));
  }
}

void Agreement::accept_next(std::deque<Task>& tasks) {
  const Decision decision = std::move(decisions_.front());
  decisions_.pop_front();
  const auto it = sets_.find(decision.set);
  if (it == sets_.end()) return;  // removed, and nothing of this rank was open
  std::vector<Entry> forgotten;
  define(it->second, decision, forgotten);
  for (const auto& rejection : decision.rejections) reject(decision.set, it->second, rejection);
  line_up(decision.set, decision.agreed, forgotten, tasks);
  if (decision.last_joined >= 0)
    tasks.push_back(Task{decision.set, 0, {}, 0, decision.last_joined});
  if (!tasks.empty()) tasks.back().last = true;
}

void Agreement::define(Set& set, const Decision& decision, std::vector<Entry>& forgotten) {
  for (const auto& definition : decision.definitions) {
    Entry entry{definition.name, Description::decode(definition.description), 0, 0, nullptr};
    entry.nbytes = nbytes_of(entry.description);
    if (definition.id == Decision::kForgotten) {
      forgotten.push_back(std::move(entry));
      continue;
    }
    const auto id = static_cast<size_t>(definition.id);
    if (id >= set.entries.size()) set.entries.resize(id + 1);
    if (entry.name.empty()) {
      set.by_bytes[definition.description] = definition.id;
    } else {
      set.by_name[entry.name] = definition.id;
    }
    entry.open = std::move(set.entries[id].open);
    set.entries[id] = std::move(entry);
  }
}

void Agreement::reject(int32_t id, Set& set, const Decision::Rejection& rejection) {
  const auto& [key, kind, text, meant] = rejection;
  if (set.joining && key.seq > 0) door_.count_past(id, key.seq);
  if (std::find(meant.begin(), meant.end(), at_.rank) == meant.end()) return;
  if (has_left(at_.rank)) return;  // it hears that it was this rank that left
  const auto known = set.by_name.find(key.name);
  const int32_t entry = key.seq == 0 && known != set.by_name.end() ? known->second : -1;
  if (const RequestPtr request = take_open(set, entry, key))
    complete({request}, make_failure(kind, text));
}

// What was agreed on, in the order in which it is exchanged.
void Agreement::line_up(int32_t id, const std::vector<Decision::Agreed>& agreed,
                        std::vector<Entry>& forgotten, std::deque<Task>& tasks) {
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
                          std::to_string(at_.rank) + " has not asked for");
    if (!request) {
      request = stand_in(set, entry);
      door_.count_past(id, item.seq);
    }
    request->round = entry.rounds++;
    agreed_.push_back(request);
    candidates.push_back({&entry.description, entry.nbytes});
  }
  for (const auto& group : schedule(candidates, at_.config.fusion_nbytes)) {
    Task& task = tasks.emplace_back(Task{id, set.track});
    set.track = (set.track + 1) % kTracks;
    for (const int i : group) {
      task.requests.push_back(agreed_[static_cast<size_t>(i)]);
      task.nbytes += candidates[static_cast<size_t>(i)].nbytes;
    }
  }
  agreed_.clear();
}

RequestPtr Agreement::take_open(Set& set, int32_t id, const Key& key) {
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

// A rank that has joined contributes nothing: no rows, or zeros, for which it has no memory yet.
RequestPtr Agreement::stand_in(const Set& set, const Entry& entry) {
  const Description& d = entry.description;
  auto request = std::make_shared<Request>();
  request->description = d;
  if (d.on_device) request->device = device_;
  if (d.kind == OpKind::kAllgather || d.kind == OpKind::kAlltoall)
    request->rows.assign(tensors_of(d).size(), 0);
  request->splits.assign(set.ranks.size(), 0);
  request->stands_in = true;
  ++open_count_;
  return request;
}

// ---- process sets ----------------------------------------------------------------------------

Agreement::Members Agreement::members_of(int32_t set) const {
  const Set& known = sets_.at(set);
  return {known.ranks, known.me};
}

int32_t Agreement::add_set(const std::vector<int64_t>& ranks) {
  const int32_t id = next_set_++;
  Set& set = sets_[id];
  set.ranks.assign(ranks.begin(), ranks.end());
  const auto me = std::find(set.ranks.begin(), set.ranks.end(), at_.rank);
  set.me = me == set.ranks.end() ? -1 : static_cast<int>(me - set.ranks.begin());
  door_.add_set(id, set.ranks);
  return id;
}

void Agreement::remove_set(int32_t id) {
  door_.remove_set(id);
  Set& set = sets_.at(id);
  set.removed = true;
  removed_.push_back(id);
  if (set.me < 0) return;
  set.report.last = true;
  send_reports();
}

void Agreement::forget_removed() {
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

// ---- requests --------------------------------------------------------------------------------

void Agreement::complete(const std::vector<RequestPtr>& requests, const FailurePtr& failure) {
  ended_s_ = now_s();
  open_count_ -= static_cast<int64_t>(requests.size());
  door_.complete(requests, failure);
}

void Agreement::finish_join(int32_t id, int last_joined) {
  Set& set = sets_.at(id);
  if (!set.joining) return;
  set.joining->handle->value = last_joined;
  complete({std::exchange(set.joining, nullptr)}, nullptr);
}

void Agreement::fail_everything(std::vector<RequestPtr> lined_up, const FailurePtr& failure) {
  door_.take_rest(taken_);
  std::vector<RequestPtr> open;
  open.swap(taken_);
  for (auto& [id, set] : sets_) {
    for (Entry& entry : set.entries)
      if (entry.open) open.push_back(std::move(entry.open));
    for (auto& [key, request] : set.open) open.push_back(request);
    set.open.clear();
    if (set.joining) open.push_back(std::exchange(set.joining, nullptr));
    set.report.clear();
  }
  for (auto* more : {&agreed_, &lined_up}) {
    open.insert(open.end(), more->begin(), more->end());
    more->clear();
  }
  const auto done = [](const RequestPtr& request) { return request->handle->done(); };
  open.erase(std::remove_if(open.begin(), open.end(), done), open.end());
  complete(open, failure);
  open_count_ = 0;
  decisions_.clear();
}

// ---- who is left -----------------------------------------------------------------------------

void Agreement::leave(int rank) {
  left_[static_cast<size_t>(rank)] = true;
  if (ledger_) ledger_->leave(rank);
}

bool Agreement::all_have_left() const {
  return std::all_of(left_.begin(), left_.end(), [](bool left) { return left; });
}

}  // namespace bagua
