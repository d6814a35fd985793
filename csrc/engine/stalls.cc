#include "engine/stalls.h"

#include <algorithm>

namespace bagua {

Stalls stalls_in(const Ledger& ledger, double now_s, double age_s) {
  Stalls found = ledger.stalls(now_s, age_s);
  const auto quiet = [](const Ledger::Stall& stall) { return stall.background; };
  found.erase(std::remove_if(found.begin(), found.end(), quiet), found.end());
  return found;
}

Stalls hopeless_stalls_in(const Ledger& ledger, double now_s, double age_s,
                          const std::function<bool(int)>& waits) {
  if (stalls_in(ledger, now_s, age_s).empty()) return {};
  Stalls open = ledger.stalls(now_s, 0);
  std::vector<bool> stuck(ledger.ranks_of(0).size());
  for (const auto& stall : open)
    for (const int rank : stall.waiting) stuck[rank] = true;
  for (int rank = 0; rank < static_cast<int>(stuck.size()); ++rank)
    stuck[rank] = stuck[rank] && now_s - ledger.heard_s(rank) >= age_s && waits(rank);
  // Until no more come: who waits for one that may come is not stuck itself.
  for (bool more = true; more;) {
    more = false;
    const auto may_end = [&](const Ledger::Stall& stall) {
      const auto is_stuck = [&](int rank) { return stuck[rank]; };
      const auto& missing = stall.missing;
      if (!stall.background && std::any_of(missing.begin(), missing.end(), is_stuck)) return false;
      for (const int rank : stall.waiting) {
        more = more || stuck[rank];
        stuck[rank] = false;
      }
      return true;
    };
    open.erase(std::remove_if(open.begin(), open.end(), may_end), open.end());
  }
  const auto young = [&](const auto& stall) { return now_s - stall.since_s < age_s; };
  open.erase(std::remove_if(open.begin(), open.end(), young), open.end());
  return open;
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
