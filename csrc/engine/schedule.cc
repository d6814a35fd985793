#include "engine/schedule.h"

#include <algorithm>
#include <numeric>

#include "collective/collective.h"

namespace bagua {
namespace {

bool fusible(const Description& d) {
  return d.kind == OpKind::kAllreduce && d.op != ReduceOp::kAdasum && d.peers.empty() &&
         (d.codec.empty() || !d.on_device);
}

bool alike(const Description& a, const Description& b) {
  return a.op == b.op && a.prescale == b.prescale && a.postscale == b.postscale &&
         a.on_device == b.on_device && a.captured == b.captured && a.codec == b.codec &&
         a.exact_in_nodes == b.exact_in_nodes;
}

}  // namespace

std::vector<std::vector<int>> schedule(const std::vector<Candidate>& candidates,
                                       int64_t fusion_nbytes) {
  std::vector<int> order(candidates.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return candidates[a].description->priority > candidates[b].description->priority;
  });

  struct Open {
    size_t group;
    int64_t nbytes;
  };
  std::vector<Open> open;  // groups that still take more
  std::vector<std::vector<int>> groups;
  for (const int i : order) {
    const Candidate& candidate = candidates[i];
    const bool coded = !candidate.description->codec.empty();
    const int64_t most = coded ? int64_t{kAheadNbytes} : fusion_nbytes;
    const auto place = std::find_if(open.begin(), open.end(), [&](const Open& o) {
      return alike(*candidates[groups[o.group][0]].description, *candidate.description) &&
             o.nbytes + candidate.nbytes <= most;
    });
    const bool may_share = fusible(*candidate.description) && candidate.nbytes < most;
    if (may_share && place != open.end()) {
      groups[place->group].push_back(i);
      place->nbytes += candidate.nbytes;
      continue;
    }
    if (may_share) open.push_back({groups.size(), candidate.nbytes});
    groups.push_back({i});
  }
  return groups;
}

}  // namespace bagua
