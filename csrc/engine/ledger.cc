#include "engine/ledger.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace bagua {
namespace {

// So many requests of a process set are remembered; more work too, but always travel whole.
constexpr size_t kMaxNames = 1 << 16;
constexpr size_t kMaxUnnamed = 1 << 12;

std::string list_text(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::string label_of(const Key& key, const Description& description) {
  if (!key.name.empty()) return key.name;
  return std::string(kind_name(description.kind)) + " #" + std::to_string(key.seq);
}

}  // namespace

bool allows_joined(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kAllgather || kind == OpKind::kBarrier ||
         kind == OpKind::kReducescatter || kind == OpKind::kBroadcast;
}

int Ledger::Set::member_of(int rank) const {
  const auto it = std::lower_bound(ranks.begin(), ranks.end(), rank);
  return it != ranks.end() && *it == rank ? static_cast<int>(it - ranks.begin()) : -1;
}

std::vector<int> Ledger::Set::with_bit(int32_t id) const {
  std::vector<int> found;
  for (int m = 0; m < static_cast<int>(ranks.size()); ++m)
    if (bit(m, id)) found.push_back(ranks[m]);
  return found;
}

std::vector<int> Ledger::Set::arrived(const Pending& pending) const {
  std::vector<int> found;
  for (size_t m = 0; m < ranks.size(); ++m)
    if (pending.arrivals[m] && pending.arrivals[m]->description >= 0) found.push_back(ranks[m]);
  return found;
}

bool Ledger::Set::bit(int member, int32_t id) const {
  const auto& words = bits[static_cast<size_t>(member)];
  const auto word = static_cast<size_t>(id / 64);
  return word < words.size() && (words[word] >> (id % 64) & 1);
}

void Ledger::Set::set_bit(int member, int32_t id) {
  auto& words = bits[static_cast<size_t>(member)];
  const auto word = static_cast<size_t>(id / 64);
  if (word >= words.size()) words.resize(word + 1);
  words[word] |= uint64_t{1} << (id % 64);
}

void Ledger::Set::clear_bit(int member, int32_t id) {
  auto& words = bits[static_cast<size_t>(member)];
  const auto word = static_cast<size_t>(id / 64);
  if (word < words.size()) words[word] &= ~(uint64_t{1} << (id % 64));
}

Ledger::Ledger(int world_size) {
  Set& world = sets_[0];
  world.ranks.resize(static_cast<size_t>(world_size));
  std::iota(world.ranks.begin(), world.ranks.end(), 0);
  world.bits.resize(world.ranks.size());
  world.joined.resize(world.ranks.size());
  world.left.resize(world.ranks.size());
}

const std::vector<int>& Ledger::ranks_of(int32_t set) const { return sets_.at(set).ranks; }

std::vector<Decision> Ledger::take(bool everything) {
  std::vector<Decision> taken;
  for (Decision& d : decisions_) {
    // Who has joined stands in for requests that were agreed before, and for no others.
    everything = everything || d.last_joined >= 0;
    // Bits come first and in the order of ids: this is what the others will see.
    std::stable_sort(d.agreed.begin(), d.agreed.end(), [](const auto& a, const auto& b) {
      return a.as_bit() && (!b.as_bit() || a.id < b.id);
    });
    if (!everything) hold_back(d);
    while (everything && has_background()) taken.push_back(take_background());
    if (d.empty()) continue;
    taken.push_back(std::move(d));
  }
  decisions_.clear();
  while (everything && has_background()) taken.push_back(take_background());
  return taken;
}

void Ledger::hold_back(Decision& d) {
  const auto gives_way = [&](const Decision::Agreed& item) {
    return item.id != Decision::kForgotten &&
           sets_[d.set].entries[static_cast<size_t>(item.id)].description.background;
  };
  const auto rest = std::stable_partition(d.agreed.begin(), d.agreed.end(), std::not_fn(gives_way));
  for (auto item = rest; item != d.agreed.end(); ++item) background_.emplace_back(d.set, *item);
  d.agreed.erase(rest, d.agreed.end());
}

Decision Ledger::take_background() {
  Decision next;
  next.set = background_.front().first;
  next.agreed = {background_.front().second};
  background_.pop_front();
  return next;
}

Decision& Ledger::decision(int32_t set) {
  if (decisions_.empty() || decisions_.back().set != set) {
    decisions_.emplace_back();
    decisions_.back().set = set;
  }
  return decisions_.back();
}

void Ledger::report(int rank, const Report& report, double now_s) {
  const auto found = sets_.find(report.set);
  if (found == sets_.end()) return;  // a set that was removed while this was on its way
  const int member = found->second.member_of(rank);
  if (member < 0) return;
  if (found->second.removed) return turn_away(rank, report);
  // A name that was refused may be used again at once: then its refusal is the older report.
  for (const auto& full : report.full) arrive(report.set, member, full, now_s);
  for (const int32_t id : report.ids) arrive_bit(report.set, member, id, now_s);
  for (const auto& again : report.unnamed) {
    const Entry& entry = found->second.entries[static_cast<size_t>(again.id)];
    arrive(report.set, member, {{"", again.seq}, entry.description.encode(), ""}, now_s);
  }
  if (report.join) join(report.set, member);
}

// For a process set that was removed while the report was on its way.
void Ledger::turn_away(int rank, const Report& report) {
  const std::string text = "process set " + std::to_string(report.set) + " has been removed";
  const auto reject = [&](const Key& key) {
    decision(report.set).rejections.push_back({key, ErrorKind::kUsage, text, {rank}});
  };
  for (const int32_t id : report.ids)
    reject({sets_[report.set].entries[static_cast<size_t>(id)].name, 0});
  for (const auto& again : report.unnamed) reject({"", again.seq});
  for (const auto& full : report.full)
    if (full.refusal.empty()) reject(full.key);
}

void Ledger::arrive_bit(int32_t set, int member, int32_t id, double now_s) {
  Set& s = sets_[set];
  Entry& entry = s.entries[static_cast<size_t>(id)];
  s.set_bit(member, id);
  if (entry.open_since_s == 0) entry.open_since_s = now_s;
  const auto contested = s.pending.empty() ? s.pending.end() : s.pending.find({entry.name, 0});
  if (contested == s.pending.end()) return settle_bits(set, id);
  gather_bits(s, id, contested->second);
  settle_pending(set, contested);
}

// Members whose bit is set arrive with the entry's own description.
void Ledger::gather_bits(Set& s, int32_t id, Pending& pending) {
  const std::string bytes = s.entries[static_cast<size_t>(id)].description.encode();
  for (int member = 0; member < static_cast<int>(s.ranks.size()); ++member) {
    if (!s.bit(member, id)) continue;
    s.clear_bit(member, id);
    if (pending.arrivals[static_cast<size_t>(member)]) {
      pending.later.push_back({member, {{s.entries[static_cast<size_t>(id)].name, 0}, bytes, ""}});
      continue;
    }
    const auto at = std::find(pending.descriptions.begin(), pending.descriptions.end(), bytes);
    const int index = static_cast<int>(at - pending.descriptions.begin());
    if (at == pending.descriptions.end()) pending.descriptions.push_back(bytes);
    pending.arrivals[static_cast<size_t>(member)] = Arrival{index, ""};
    ++pending.count;
  }
  s.entries[static_cast<size_t>(id)].open_since_s = 0;
}

void Ledger::arrive(int32_t set, int member, const Report::Full& full, double now_s) {
  Set& s = sets_[set];
  const auto [it, fresh] = s.pending.try_emplace(full.key);
  Pending& pending = it->second;
  if (fresh) {
    pending.arrivals.resize(s.ranks.size());
    pending.since_s = now_s;
    const auto known = s.by_name.find(full.key.name);
    if (full.key.seq == 0 && known != s.by_name.end()) gather_bits(s, known->second, pending);
  }
  auto& place = pending.arrivals[static_cast<size_t>(member)];
  if (place) {
    pending.later.push_back({member, full});
    return;
  }
  int index = -1;
  if (full.refusal.empty()) {
    const auto at =
        std::find(pending.descriptions.begin(), pending.descriptions.end(), full.description);
    index = static_cast<int>(at - pending.descriptions.begin());
    if (at == pending.descriptions.end()) pending.descriptions.push_back(full.description);
  }
  place = Arrival{index, full.refusal};
  ++pending.count;
  settle_pending(set, it);
}

void Ledger::settle_bits(int32_t set, int32_t id) {
  Set& s = sets_[set];
  Entry& entry = s.entries[static_cast<size_t>(id)];
  const OpKind kind = entry.description.kind;
  std::vector<int> gone;
  bool waiting = false;
  for (int m = 0; m < static_cast<int>(s.ranks.size()); ++m) {
    if (s.left[m]) gone.push_back(s.ranks[m]);
    if (s.bit(m, id)) continue;
    waiting = waiting || !s.joined[m];
  }
  if (waiting && gone.empty()) return;
  const std::string problem =
      gone.empty() ? objection(set, entry.description)
                   : list_text(gone) + (gone.size() == 1 ? " has" : " have") + " shut down";
  if (problem.empty()) {
    decision(set).agreed.push_back({id, 0});
  } else {
    decision(set).rejections.push_back(
        {{entry.name, 0},
         gone.empty() ? ErrorKind::kUsage : ErrorKind::kPeer,
         entry.name + ": " + problem + " and takes no part in this " + kind_name(kind) +
             (gone.empty() ? ""
                           : "; did it end by an error? With fewer batches it should call join()"),
         s.with_bit(id)});
  }
  for (int m = 0; m < static_cast<int>(s.ranks.size()); ++m) s.clear_bit(m, id);
  entry.open_since_s = 0;
}

void Ledger::settle_pending(int32_t set, std::map<Key, Pending>::iterator it) {
  Set& s = sets_[set];
  Pending& pending = it->second;
  std::vector<int> gone;
  bool waiting = false;
  for (size_t m = 0; m < s.ranks.size(); ++m) {
    if (s.left[m]) gone.push_back(s.ranks[m]);
    if (pending.arrivals[m]) continue;
    waiting = waiting || !s.joined[m];
  }
  if (waiting && gone.empty()) return;
  if (pending.count == 0) {
    s.pending.erase(it);
    return;
  }
  const Key key = it->first;
  Pending settled = std::move(pending);
  s.pending.erase(it);
  if (gone.empty()) {
    resolve(set, key, settled);
  } else {
    const std::string label = settled.descriptions.empty()
                                  ? key.name
                                  : label_of(key, Description::decode(settled.descriptions[0]));
    decision(set).rejections.push_back(
        {key, ErrorKind::kPeer,
         label + ": cannot be completed without " + list_text(gone) +
             ", already shut down; did it return early or skip a step?",
         s.arrived(settled)});
  }
  for (auto& [member, full] : settled.later) arrive(set, member, full, settled.since_s);
}

void Ledger::resolve(int32_t set, const Key& key, Pending& pending) {
  Set& s = sets_[set];
  std::string refusals;
  for (size_t m = 0; m < s.ranks.size(); ++m)
    if (pending.arrivals[m] && pending.arrivals[m]->description < 0)
      refusals += (refusals.empty() ? "" : "; ") + ("rank " + std::to_string(s.ranks[m])) + ": " +
                  pending.arrivals[m]->refusal;
  std::string problem = refusals;
  if (problem.empty() && pending.descriptions.size() > 1) problem = mismatch(s, pending);
  if (problem.empty()) problem = objection(set, Description::decode(pending.descriptions[0]));
  if (problem.empty()) return agree(set, key, pending.descriptions[0]);
  const std::string label = pending.descriptions.empty()
                                ? key.name
                                : label_of(key, Description::decode(pending.descriptions[0]));
  decision(set).rejections.push_back({key, ErrorKind::kUsage,
                                      label.empty() ? problem : label + ": " + problem,
                                      s.arrived(pending)});
}

std::string Ledger::mismatch(const Set& s, const Pending& pending) const {
  std::vector<int> holders[2];
  for (size_t m = 0; m < s.ranks.size(); ++m)
    if (pending.arrivals[m] && pending.arrivals[m]->description < 2)
      holders[pending.arrivals[m]->description].push_back(s.ranks[m]);
  const int first = holders[0] < holders[1] ? 0 : 1;
  const Difference d =
      first_difference(Description::decode(pending.descriptions[static_cast<size_t>(first)]),
                       Description::decode(pending.descriptions[static_cast<size_t>(1 - first)]));
  return "ranks disagree on " + d.what + ": " + d.here + " on " + list_text(holders[first]) + ", " +
         d.there + " on " + list_text(holders[1 - first]) +
         "; every rank must make the same call in the same order";
}

// Why members that have joined, or the book itself, cannot let an agreed request go ahead.
std::string Ledger::objection(int32_t set, const Description& description) const {
  const Set& s = sets_.at(set);
  if (s.joined_count > 0 && !allows_joined(description.kind))
    return "rank " + std::to_string(s.last_joined) + " has joined";
  if (s.joined_count > 0 && description.captured)
    return "rank " + std::to_string(s.last_joined) + " has joined, and will not do it again";
  // Zeros of a rank that has joined would be taken for values, and its copies of others go wrong.
  if (s.joined_count > 0 && !description.codec.empty() && !description.peers.empty())
    return "rank " + std::to_string(s.last_joined) + " has joined";
  if (description.kind == OpKind::kBroadcast) {
    const int root = s.member_of(description.root);
    if (root >= 0 && s.joined[static_cast<size_t>(root)])
      return "its root, rank " + std::to_string(description.root) + ", has joined";
  }
  if (description.kind == OpKind::kAddProcessSet) {
    const std::vector<int> ranks(description.layout.begin(), description.layout.end());
    for (const auto& [id, other] : sets_)
      if (!other.removed && other.ranks == ranks)
        return "process set " + std::to_string(id) + " already has these ranks";
  }
  if (description.kind == OpKind::kRemoveProcessSet) {
    const auto it = sets_.find(description.root);
    if (description.root == 0) return "the world cannot be removed";
    if (it == sets_.end() || it->second.removed)
      return "there is no process set " + std::to_string(description.root);
  }
  return "";
}

void Ledger::agree(int32_t set, const Key& key, const std::string& bytes) {
  Set& s = sets_[set];
  const bool named = key.seq == 0;
  auto& index = named ? s.by_name : s.by_bytes;
  const std::string& known_as = named ? key.name : bytes;
  if (index.size() >= (named ? kMaxNames : kMaxUnnamed) && index.count(known_as) == 0) {
    decision(set).definitions.push_back({Decision::kForgotten, key.name, bytes});
    decision(set).agreed.push_back({Decision::kForgotten, key.seq});
    return apply(set, Description::decode(bytes));
  }
  const auto [it, fresh] = index.try_emplace(known_as, static_cast<int32_t>(s.entries.size()));
  const int32_t id = it->second;
  if (fresh) s.entries.emplace_back();
  Entry& entry = s.entries[static_cast<size_t>(id)];
  if (fresh || named) {
    entry.name = key.name;
    entry.description = Description::decode(bytes);
    decision(set).definitions.push_back({id, key.name, bytes});
  }
  decision(set).agreed.push_back({id, key.seq});
  apply(set, entry.description);
}

void Ledger::apply(int32_t set, const Description& description) {
  if (description.kind == OpKind::kAddProcessSet) {
    Set& s = sets_[next_set_++];
    s.ranks.assign(description.layout.begin(), description.layout.end());
    s.bits.resize(s.ranks.size());
    s.joined.resize(s.ranks.size());
    s.left.resize(s.ranks.size());
    const Set& world = sets_[0];
    for (size_t m = 0; m < s.ranks.size(); ++m)
      s.left[m] = world.left[static_cast<size_t>(s.ranks[m])];
  } else if (description.kind == OpKind::kRemoveProcessSet) {
    Set& s = sets_[description.root];
    const int32_t id = description.root;
    s.removed = true;
    // What was still open in it can never be completed.
    for (const Stall& stall : stalls(1e18, 0))
      if (stall.set == id) reject(stall, "process set " + std::to_string(id) + " was removed");
    decision(set);
  }
}

void Ledger::join(int32_t set, int member) {
  Set& s = sets_[set];
  if (s.joined[static_cast<size_t>(member)]) return;
  s.joined[static_cast<size_t>(member)] = true;
  s.last_joined = s.ranks[static_cast<size_t>(member)];
  ++s.joined_count;
  settle_all(set);
  settle_join(set);
}

// A join is over when every member has joined, or left and will not.
void Ledger::settle_join(int32_t set) {
  Set& s = sets_[set];
  if (s.joined_count == 0) return;
  for (size_t m = 0; m < s.ranks.size(); ++m)
    if (!s.joined[m] && !s.left[m]) return;
  decision(set).last_joined = s.last_joined;
  s.joined.assign(s.joined.size(), false);
  s.joined_count = 0;
  // A later decision of this set starts its order anew.
  decisions_.emplace_back();
  decisions_.back().set = set;
}

void Ledger::leave(int rank) {
  for (auto& [id, s] : sets_) {
    const int member = s.member_of(rank);
    if (member < 0 || s.removed) continue;
    s.left[static_cast<size_t>(member)] = true;
    settle_all(id);
    settle_join(id);
  }
}

// Looks again at everything open after members joined or left.
void Ledger::settle_all(int32_t set) {
  Set& s = sets_[set];
  for (int32_t id = 0; id < static_cast<int32_t>(s.entries.size()); ++id)
    if (s.entries[static_cast<size_t>(id)].open_since_s > 0) settle_bits(set, id);
  std::vector<Key> keys;
  for (const auto& [key, pending] : s.pending) keys.push_back(key);
  for (const Key& key : keys) {
    const auto it = s.pending.find(key);
    if (it != s.pending.end()) settle_pending(set, it);
  }
}

std::vector<Ledger::Stall> Ledger::stalls(double now_s, double age_s) const {
  std::vector<Stall> found;
  for (const auto& [id, s] : sets_) {
    const auto missing = [&, &ranks = s](auto&& has) {
      std::vector<int> result;
      for (int m = 0; m < static_cast<int>(ranks.ranks.size()); ++m)
        if (!has(m) && !ranks.joined[static_cast<size_t>(m)]) result.push_back(ranks.ranks[m]);
      return result;
    };
    for (int32_t e = 0; e < static_cast<int32_t>(s.entries.size()); ++e) {
      const Entry& entry = s.entries[static_cast<size_t>(e)];
      if (entry.open_since_s == 0 || now_s - entry.open_since_s < age_s) continue;
      found.push_back({id,
                       {entry.name, 0},
                       entry.name,
                       missing([&, &set = s](int m) { return set.bit(m, e); }),
                       s.with_bit(e),
                       entry.open_since_s});
    }
    for (const auto& [key, pending] : s.pending) {
      if (now_s - pending.since_s < age_s) continue;
      const std::string label = pending.descriptions.empty()
                                    ? key.name
                                    : label_of(key, Description::decode(pending.descriptions[0]));
      found.push_back({id, key, label,
                       missing([&p = pending](int m) { return p.arrivals[m].has_value(); }),
                       s.arrived(pending), pending.since_s});
    }
  }
  return found;
}

void Ledger::reject(const Stall& stall, const std::string& text) {
  Set& s = sets_[stall.set];
  decision(stall.set).rejections.push_back({stall.key, ErrorKind::kPeer, text, stall.waiting});
  s.pending.erase(stall.key);
  const auto known = s.by_name.find(stall.key.name);
  if (stall.key.seq != 0 || known == s.by_name.end()) return;
  for (int m = 0; m < static_cast<int>(s.ranks.size()); ++m) s.clear_bit(m, known->second);
  s.entries[static_cast<size_t>(known->second)].open_since_s = 0;
}

bool Ledger::any_open() const {
  for (const auto& [id, s] : sets_) {
    if (!s.pending.empty()) return true;
    for (const Entry& entry : s.entries)
      if (entry.open_since_s > 0) return true;
  }
  return false;
}

}  // namespace bagua
