// What reports amount to: agreed, rejected, or not yet either.
#include <algorithm>

#include "common/ranks_text.h"
#include "engine/ledger.h"

namespace bagua {
namespace {

// So many requests of a process set are remembered; more work too, but always travel whole.
constexpr size_t kMaxNames = 1 << 16;
constexpr size_t kMaxUnnamed = 1 << 12;

std::string gone_text(const std::vector<int>& gone) {
  return ranks_text(gone) + (gone.size() == 1 ? " has" : " have") +
         " shut down; by an error, or ahead of the others? With fewer batches a rank should "
         "join(); from a checkpoint all begin with the same epoch, and where a metric ends "
         "training all go by the same value";
}

}  // namespace

std::string Ledger::Pending::label(const Key& key) const {
  if (!key.name.empty() || descriptions.empty()) return key.name;
  const OpKind kind = Description::decode(descriptions[0]).kind;
  return std::string(kind_name(kind)) + " #" + std::to_string(key.seq);
}

bool Ledger::Pending::of_several_steps() const {
  const Description first = Description::decode(descriptions.at(0));
  return std::any_of(descriptions.begin(), descriptions.end(), [&](const std::string& bytes) {
    const Description other = Description::decode(bytes);
    return other.earlier != first.earlier || other.failures != first.failures;
  });
}

bool Ledger::Pending::background() const {
  return !descriptions.empty() && Description::decode(descriptions[0]).background;
}

void Ledger::settle_bits(int32_t set, int32_t id) {
  Set& s = sets_[set];
  Entry& entry = s.entries[static_cast<size_t>(id)];
  if (s.surely_waits(entry.ready)) return;
  std::vector<int> gone;
  bool waiting = false;
  for (int m = 0; m < static_cast<int>(s.ranks.size()); ++m) {
    if (s.left[m]) gone.push_back(s.ranks[m]);
    if (s.bit(m, id)) continue;
    waiting = waiting || !s.joined[m];
  }
  const std::string withdrawn = s.why_withdrawn(entry.name);
  if (waiting && gone.empty() && withdrawn.empty()) return;
  const std::string problem = gone.empty() ? objection(set, entry.description) : "";
  if (!withdrawn.empty()) {
    turn_down(set, {entry.name, 0}, ErrorKind::kPeer, withdrawn, s.with_bit(id));
  } else if (!gone.empty()) {
    turn_down(set, {entry.name, 0}, ErrorKind::kLeft, gone_text(gone), s.with_bit(id));
  } else if (!problem.empty()) {
    turn_down(set, {entry.name, 0}, s.objects_as(), problem, s.with_bit(id));
  } else {
    s.meet(entry.description, entry.open_since_s);
    decision(set).agreed.push_back({id, 0});
  }
  for (int m = 0; m < static_cast<int>(s.ranks.size()); ++m) s.clear_bit(m, id);
  entry.open_since_s = 0;
}

void Ledger::settle_pending(int32_t set, std::map<Key, Pending>::iterator it) {
  Set& s = sets_[set];
  Pending& pending = it->second;
  if (s.surely_waits(pending.count)) return;
  std::vector<int> gone;
  bool waiting = false;
  for (size_t m = 0; m < s.ranks.size(); ++m) {
    if (s.left[m]) gone.push_back(s.ranks[m]);
    if (pending.arrivals[m]) continue;
    waiting = waiting || !s.joined[m];
  }
  const std::string withdrawn = s.why_withdrawn(it->first.name);
  if (waiting && gone.empty() && withdrawn.empty()) return;
  if (pending.count == 0) {
    s.pending.erase(it);
    return;
  }
  const Key key = it->first;
  Pending settled = std::move(pending);
  s.pending.erase(it);
  if (!withdrawn.empty()) {
    turn_down(set, key, ErrorKind::kPeer, withdrawn, s.arrived(settled));
  } else if (gone.empty()) {
    resolve(set, key, settled);
  } else {
    turn_down(set, key, ErrorKind::kLeft, gone_text(gone), s.arrived(settled), settled.label(key));
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
  ErrorKind kind = ErrorKind::kUsage;
  if (problem.empty() && pending.descriptions.size() > 1) {
    problem = mismatch(s, pending);
    if (pending.of_several_steps()) kind = ErrorKind::kPeer;  // some are ahead of the others
  }
  if (problem.empty()) {
    problem = objection(set, Description::decode(pending.descriptions[0]));
    kind = s.objects_as();
  }
  if (problem.empty()) {
    s.meet(Description::decode(pending.descriptions[0]), pending.since_s);
    return agree(set, key, pending.descriptions[0]);
  }
  turn_down(set, key, kind, problem, s.arrived(pending), pending.label(key));
}

void Ledger::turn_down(int32_t set, const Key& key, ErrorKind kind, const std::string& why,
                       std::vector<int> ranks, std::string label) {
  Decision::Rejection rejection;
  rejection.key = key;
  rejection.kind = kind;
  if (label.empty()) label = key.name;
  rejection.text = label.empty() ? why : label + ": " + why;
  rejection.ranks = std::move(ranks);
  decision(set).rejections.push_back(std::move(rejection));
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
  return "ranks disagree on " + d.what + ": " + d.here + " on " + ranks_text(holders[first]) +
         ", " + d.there + " on " + ranks_text(holders[1 - first]) +
         "; every rank must make the same call in the same order";
}

// Why members that have joined, or the book itself, cannot let an agreed request go ahead.
std::string Ledger::objection(int32_t set, const Description& description) const {
  const Set& s = sets_.at(set);
  if (s.joined_count > 0 && !allows_joined(description.kind))
    return "rank " + std::to_string(s.last_joined) + " has joined and takes no part in this " +
           kind_name(description.kind);
  if (s.joined_count > 0 && description.captured)
    return "rank " + std::to_string(s.last_joined) + " has joined, and will not do it again";
  // Zeros of a rank that has joined would be taken for values, and its copies of others go wrong.
  if (s.joined_count > 0 && !description.codec.empty() && !description.peers.empty())
    return "rank " + std::to_string(s.last_joined) +
           " has joined, and its neighbors keep copies of its values: take as many steps on every "
           "rank, or send weights as they are";
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
    const Description description = Description::decode(bytes);
    // Rounds are counted of what has peers, and what gives way waits, under the number of an entry.
    if (description.peers.empty() && !description.background) {
      decision(set).definitions.push_back({Decision::kForgotten, key.name, bytes});
      decision(set).agreed.push_back({Decision::kForgotten, key.seq});
      return apply(set, description);
    }
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
    for (size_t m = 0; m < s.ranks.size(); ++m) {
      s.left[m] = world.left[static_cast<size_t>(s.ranks[m])];
      s.anyone_left = s.anyone_left || s.left[m];
    }
  } else if (description.kind == OpKind::kRemoveProcessSet) {
    Set& s = sets_[description.root];
    const int32_t id = description.root;
    s.removed = true;
    removed_.push_back(id);
    // What was still open in it can never be completed.
    for (const Stall& stall : stalls(1e18, 0))
      if (stall.set == id) reject(stall, "process set " + std::to_string(id) + " was removed");
    s.pending.clear();
    decision(set);
  }
}

void Ledger::join(int32_t set, int member, double now_s) {
  Set& s = sets_[set];
  if (s.joined[static_cast<size_t>(member)]) return;
  if (s.joined_count == 0) s.joined_since_s = now_s;
  s.joined[static_cast<size_t>(member)] = true;
  s.last_joined = s.ranks[static_cast<size_t>(member)];
  ++s.joined_count;
  // It comes to nothing any more that it was late for.
  s.forget_given_up([&](int whose, double) { return whose == member; });
  settle_all(set);
  settle_join(set);
}

std::optional<Ledger::Stall> Ledger::join_stall(int32_t set) const {
  const Set& s = sets_.at(set);
  if (s.joined_count == 0) return std::nullopt;
  Stall stall{set, {}, kind_name(OpKind::kJoin), {}, {}, s.joined_since_s};
  for (size_t m = 0; m < s.ranks.size(); ++m) {
    const int rank = s.ranks[m];
    if (s.joined[m]) {
      stall.waiting.push_back(rank);
    } else if (!s.left[m]) {
      stall.missing.push_back(rank);
      stall.since_s = std::max(stall.since_s, heard_s_[static_cast<size_t>(rank)]);
    }
  }
  return stall;
}

void Ledger::reject_joins(const Stall& stall, const std::string& text) {
  // A decision of its own: what was agreed with who has joined comes before.
  decisions_.emplace_back();
  decisions_.back().set = stall.set;
  decisions_.back().rejections.push_back({stall.key, ErrorKind::kPeer, text, stall.waiting});
  forget_joins(sets_[stall.set]);
}

void Ledger::forget_joins(Set& s) {
  s.joined.assign(s.joined.size(), false);
  s.joined_count = 0;
}

// A join is over when every member has joined, or left and will not.
void Ledger::settle_join(int32_t set) {
  Set& s = sets_[set];
  if (s.joined_count == 0) return;
  for (size_t m = 0; m < s.ranks.size(); ++m)
    if (!s.joined[m] && !s.left[m]) return;
  decision(set).last_joined = s.last_joined;
  forget_joins(s);
  // What is agreed later has every member again.
  decisions_.emplace_back();
  decisions_.back().set = set;
}

void Ledger::leave(int rank) {
  for (auto& [id, s] : sets_) {
    const int member = s.member_of(rank);
    if (member < 0) continue;
    s.left[static_cast<size_t>(member)] = s.anyone_left = true;
    if (s.removed) continue;
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

}  // namespace bagua
