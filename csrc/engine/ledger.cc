#include "engine/ledger.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "common/ranks_text.h"

namespace bagua {
bool allows_joined(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kAllgather || kind == OpKind::kBarrier ||
         kind == OpKind::kReducescatter || kind == OpKind::kBroadcast;
}

bool Ledger::Set::surely_waits(size_t arrived) const {
  return ranks.size() - arrived > joined_count && !anyone_left && withdrawn.empty();
}

int Ledger::Set::member_of(int rank) const {
  const auto it = std::lower_bound(ranks.begin(), ranks.end(), rank);
  return it != ranks.end() && *it == rank ? static_cast<int>(it - ranks.begin()) : -1;
}

std::string Ledger::Set::why_withdrawn(const std::string& name) const {
  for (const auto& [beginning, why] : withdrawn)
    if (name.compare(0, beginning.size(), beginning) == 0) return why;
  return "";
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

std::vector<int> Ledger::Set::waiting(const Pending& pending) const {
  std::vector<int> found = arrived(pending);
  for (const auto& [member, full] : pending.later)
    if (full.refusal.empty()) found.push_back(ranks[static_cast<size_t>(member)]);
  std::sort(found.begin(), found.end());
  return found;
}

bool Ledger::Set::bit(int member, int32_t id) const {
  const auto& words = bits[static_cast<size_t>(member)];
  const auto word = static_cast<size_t>(id / 64);
  return word < words.size() && (words[word] >> (id % 64) & 1);
}

void Ledger::Set::set_bit(int member, int32_t id) {
  if (bit(member, id)) return;
  auto& words = bits[static_cast<size_t>(member)];
  const auto word = static_cast<size_t>(id / 64);
  if (word >= words.size()) words.resize(word + 1);
  words[word] |= uint64_t{1} << (id % 64);
  ++entries[static_cast<size_t>(id)].ready;
}

void Ledger::Set::clear_bit(int member, int32_t id) {
  if (!bit(member, id)) return;
  bits[static_cast<size_t>(member)][static_cast<size_t>(id / 64)] &= ~(uint64_t{1} << (id % 64));
  --entries[static_cast<size_t>(id)].ready;
}

Ledger::Ledger(int world_size) : heard_s_(static_cast<size_t>(world_size)) {
  Set& world = sets_[0];
  world.ranks.resize(static_cast<size_t>(world_size));
  std::iota(world.ranks.begin(), world.ranks.end(), 0);
  world.bits.resize(world.ranks.size());
  world.joined.resize(world.ranks.size());
  world.left.resize(world.ranks.size());
}

const std::vector<int>& Ledger::ranks_of(int32_t set) const { return sets_.at(set).ranks; }

std::vector<Decision> Ledger::take(bool everything) {
  forget_removed();
  std::vector<Decision> taken;
  for (Decision& d : decisions_) {
    // Who has joined stands in for requests that were agreed before, and for no others.
    everything = everything || d.ends_joins();
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
  heard_s_[static_cast<size_t>(rank)] = now_s;
  const auto found = sets_.find(report.set);
  if (found == sets_.end()) return;  // a set that was removed while this was on its way
  const int member = found->second.member_of(rank);
  if (member < 0) return;
  if (found->second.removed) {
    if (report.last) found->second.left[static_cast<size_t>(member)] = true;
    return turn_away(rank, report);
  }
  // A name that was refused may be used again at once: then its refusal is the older report.
  for (const auto& full : report.full) arrive(report.set, member, full, now_s);
  for (const int32_t id : report.ids) arrive_bit(report.set, member, id, now_s);
  for (const auto& again : report.unnamed) {
    const Entry& entry = found->second.entries[static_cast<size_t>(again.id)];
    arrive(report.set, member, {{"", again.seq}, entry.description.encode(), ""}, now_s);
  }
  if (report.join) join(report.set, member, now_s);
}

// Nothing is reported of them any more, so nothing can be decided.
void Ledger::forget_removed() {
  if (removed_.empty() || !decisions_.empty()) return;  // which may be on one of them
  const auto over = [&](int32_t id) {
    const std::vector<bool>& left = sets_.at(id).left;
    const auto waits = [&](const auto& item) { return item.first == id; };
    return std::find(left.begin(), left.end(), false) == left.end() &&
           std::none_of(background_.begin(), background_.end(), waits);
  };
  const auto rest = std::stable_partition(removed_.begin(), removed_.end(), std::not_fn(over));
  std::for_each(rest, removed_.end(), [&](int32_t id) { sets_.erase(id); });
  removed_.erase(rest, removed_.end());
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
  if (report.join) reject({});
}

void Ledger::arrive_bit(int32_t set, int member, int32_t id, double now_s) {
  Set& s = sets_[set];
  Entry& entry = s.entries[static_cast<size_t>(id)];
  if (comes_late(set, member, {entry.name, 0}, true)) return;
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
  if (pending.since_s == 0) pending.since_s = s.entries[static_cast<size_t>(id)].open_since_s;
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
  if (full.for_good) return withdraw(set, member, full);
  if (comes_late(set, member, full.key, full.refusal.empty())) return;
  Set& s = sets_[set];
  const auto [it, fresh] = s.pending.try_emplace(full.key);
  Pending& pending = it->second;
  if (fresh) {
    pending.arrivals.resize(s.ranks.size());
    const auto known = s.by_name.find(full.key.name);
    if (full.key.seq == 0 && known != s.by_name.end()) gather_bits(s, known->second, pending);
  }
  if (full.refusal.empty() && pending.since_s == 0) pending.since_s = now_s;
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

void Ledger::withdraw(int32_t set, int member, const Report::Full& full) {
  Set& s = sets_[set];
  const std::string rank = "rank " + std::to_string(s.ranks[static_cast<size_t>(member)]);
  s.withdrawn.emplace_back(full.key.name, rank + " " + full.refusal);
  settle_all(set);
}

std::vector<Ledger::Stall> Ledger::stalls(double now_s, double age_s) const {
  std::vector<Stall> found;
  for (const auto& [id, s] : sets_) {
    const auto named = [id = id](const std::string& label) {
      return id == 0 ? label : label + " (process set " + std::to_string(id) + ")";
    };
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
                       named(entry.name),
                       missing([&, &set = s](int m) { return set.bit(m, e); }),
                       s.with_bit(e),
                       entry.open_since_s,
                       entry.description.background});
    }
    for (const auto& [key, pending] : s.pending) {
      if (pending.since_s == 0 || now_s - pending.since_s < age_s) continue;
      found.push_back({id, key, named(pending.label(key)),
                       missing([&p = pending](int m) { return p.arrivals[m].has_value(); }),
                       s.waiting(pending), pending.since_s, pending.background()});
    }
    auto joins = join_stall(id);
    if (!joins || now_s - joins->since_s < age_s) continue;
    joins->label = named(joins->label);
    found.push_back(std::move(*joins));
  }
  return found;
}

void Ledger::reject(const Stall& stall, const std::string& text) {
  if (stall.key.is_join()) return reject_joins(stall, text);
  Set& s = sets_[stall.set];
  decision(stall.set).rejections.push_back({stall.key, ErrorKind::kPeer, text, stall.waiting});
  s.pending.erase(stall.key);
  const auto known = s.by_name.find(stall.key.name);
  if (stall.key.seq != 0 || known == s.by_name.end()) return;
  for (int m = 0; m < static_cast<int>(s.ranks.size()); ++m) s.clear_bit(m, known->second);
  s.entries[static_cast<size_t>(known->second)].open_since_s = 0;
}

void Ledger::give_up(const Stall& stall, const std::string& text, double now_s) {
  reject(stall, text);
  if (stall.key.is_join()) return;
  Set& s = sets_[stall.set];
  const std::string late = stall.label + ": " + ranks_text(stall.waiting) +
                           " gave up waiting for this rank (stall_fail_s)";
  for (const int rank : stall.missing) s.given_up[{s.member_of(rank), stall.key}] = {late, now_s};
}

// Whether the others have given this up; whoever `waits` for it hears so.
bool Ledger::comes_late(int32_t set, int member, const Key& key, bool waits) {
  Set& s = sets_[set];
  if (s.given_up.empty()) return false;
  const auto found = s.given_up.find({member, key});
  if (found == s.given_up.end()) return false;
  const int rank = s.ranks[static_cast<size_t>(member)];
  if (waits)
    decision(set).rejections.push_back({key, ErrorKind::kPeer, found->second.text, {rank}});
  s.given_up.erase(found);
  return true;
}

void Ledger::Set::meet(const Description& description, double since_s) {
  if (given_up.empty() || description.background) return;
  forget_given_up([&](int, double at_s) { return at_s <= since_s; });
}

void Ledger::Set::forget_given_up(const std::function<bool(int member, double at_s)>& which) {
  for (auto item = given_up.begin(); item != given_up.end();)
    item = which(item->first.first, item->second.at_s) ? given_up.erase(item) : std::next(item);
}

bool Ledger::any_open() const {
  for (const auto& [id, s] : sets_) {
    if (s.joined_count > 0) return true;
    for (const auto& [key, pending] : s.pending)
      if (pending.since_s > 0) return true;
    for (const Entry& entry : s.entries)
      if (entry.open_since_s > 0) return true;
  }
  return false;
}

}  // namespace bagua
