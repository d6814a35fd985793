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

// Those from which somebody who is waited for waits on, and on, until it is for one who waits here.
std::set<Sides> on_circles(const std::set<Sides>& all) {
  const std::vector<Sides> sides(all.begin(), all.end());
  const size_t n = sides.size();
  std::vector<std::vector<bool>> leads(n, std::vector<bool>(n));
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < n; ++j) leads[i][j] = meet(sides[i].second, sides[j].first);
  for (size_t by = 0; by < n; ++by)
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < n; ++j)
        if (leads[i][by] && leads[by][j]) leads[i][j] = true;
  std::set<Sides> found;
  for (size_t i = 0; i < n; ++i)
    if (leads[i][i]) found.insert(sides[i]);
  return found;
}

}  // namespace

Stalls stalls_in(const Ledger& ledger, double now_s, double age_s) {
  Stalls found = ledger.stalls(now_s, age_s);
  const auto quiet = [](const Ledger::Stall& stall) { return stall.background; };
  found.erase(std::remove_if(found.begin(), found.end(), quiet), found.end());
  return found;
}

Stalls mutual_stalls_in(const Ledger& ledger, double now_s, double age_s,
                        const std::function<bool(int)>& waits) {
  Stalls found = stalls_in(ledger, now_s, age_s);
  const auto stuck = [&](const std::vector<int>& ranks) {
    std::vector<int> those;
    std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(those),
                 [&](int rank) { return now_s - ledger.heard_s(rank) >= age_s && waits(rank); });
    std::sort(those.begin(), those.end());
    return those;
  };
  const auto sides_of = [&](const Ledger::Stall& stall) {
    return Sides{stuck(stall.waiting), stuck(stall.missing)};
  };
  std::set<Sides> sides;
  for (auto it = found.begin(); it != found.end() && sides.size() < kMostSides; ++it)
    sides.insert(sides_of(*it));
  const std::set<Sides> mutual = on_circles(sides);
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
