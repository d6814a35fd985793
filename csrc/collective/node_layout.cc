#include "collective/node_layout.h"

#include <algorithm>
#include <map>

namespace bagua {

NodeLayout node_layout_of(const Group& group) {
  std::map<int, std::vector<int>> nodes;
  for (int i = 0; i < group.size(); ++i) nodes[group.node_of(i)].push_back(i);
  NodeLayout layout{nodes[group.node_of(group.me())], {}, {}, group.size()};
  for (const auto& [number, members] : nodes) {
    layout.leaders = std::min(layout.leaders, static_cast<int>(members.size()));
    layout.most = std::max(layout.most, static_cast<int>(members.size()));
  }
  const auto place = std::find(layout.mine.begin(), layout.mine.end(), group.me());
  const auto leader = static_cast<size_t>(place - layout.mine.begin());
  if (leader < static_cast<size_t>(layout.leaders))
    for (const auto& [number, members] : nodes) layout.partners.push_back(members[leader]);
  std::sort(layout.partners.begin(), layout.partners.end());
  for (const int partner : layout.partners)
    layout.weights.push_back(static_cast<int>(nodes[group.node_of(partner)].size()));
  return layout;
}

}  // namespace bagua
