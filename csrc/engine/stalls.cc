#include "engine/stalls.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace bagua {
namespace {

// Of as many sides as this each is held against each; a job that is stuck has a few.
constexpr size_t kMostSides = 32;

// Who waits for whom.
using Sides = std::pair<std::vector<int>, std::vector<int>>;

// Both ascending.
bool meet(const std::vector<int>& a, const std::vector<int>& b) {
  for (auto i = a.begin(), j = b.begin(); i != a.end() && j != b.end(); *i < *j ? ++i : ++j)
    if (*i == *j) return true;
  return false;
}

}  // namespace

Stalls stalls_in(const Ledger& ledger, double now_s, double age_s) {
  Stalls found = ledger.stalls(now_s, age_s);
  const auto quiet = [](const Ledger::Stall& stall) { return stall.background; };
  found.erase(std::remove_if(found.begin(), found.end(), quiet), found.end());
  return found;
}

Stalls mutual_stalls_in(const Ledger& ledger, double now_s, double age_s) {
  Stalls found = stalls_in(ledger, now_s, age_s);
  const auto silent = [&](const std::vector<int>& ranks) {
    std::vector<int> those;
    std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(those),
                 [&](int rank) { return now_s - ledger.heard_s(rank) >= age_s; });
    std::sort(those.begin(), those.end());
    return those;
  };
  const auto sides_of = [&](const Ledger::Stall& stall) {
    return Sides{silent(stall.waiting), silent(stall.missing)};
  };
  std::set<Sides> sides;
  for (auto it = found.begin(); it != found.end() && sides.size() < kMostSides; ++it)
    sides.insert(sides_of(*it));
  std::set<Sides> mutual;
  for (const Sides& one : sides)
    for (const Sides& other : sides)
      if (meet(one.first, other.second) && meet(one.second, other.first)) mutual.insert(one);
  const auto goes = [&](const Ledger::Stall& stall) { return mutual.count(sides_of(stall)) == 0; };
  found.erase(std::remove_if(found.begin(), found.end(), goes), found.end());
  return found;
}

Instead::Instead(const Stalls& open) {
  for (const auto& stall : open)
    for (const int rank : stall.waiting) called_[rank].insert(stall.label);
}

std::string Instead::of(const Ledger::Stall& stall) const {
  const auto here = called_.find(stall.waiting.empty() ? -1 : stall.waiting[0]);
  for (const int rank : stall.missing) {
    const auto there = called_.find(rank);
    if (there == called_.end() || here == called_.end()) continue;
    for (const std::string& label : there->second)
      if (here->second.count(label) == 0)
        return (stall.missing.size() > 1 ? ", of which rank " + std::to_string(rank) : ", which") +
               " has called " + label + " instead";
  }
  return "";
}

}  // namespace bagua
