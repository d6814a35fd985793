#include "collective/node_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "collective/jobs.h"

namespace bagua {
namespace {

// Who leads a slice on one node is known to those who lead it on the others, and to nobody else.
TEST(NodeLayout, IsTheSameSeenFromEveryRank) {
  using Nodes = std::vector<int>;  // the node of each rank
  for (const Nodes& node_of :
       {Nodes{0, 0, 1, 1}, Nodes{0, 1, 0, 1}, Nodes{0, 0, 0, 1}, Nodes{0, 1, 1, 2, 0, 2},
        Nodes{5, 5, 5, 5, 2, 2, 2}, Nodes{0, 1, 2}, Nodes{3, 3}, Nodes{0, 0, 1, 2, 2, 2, 1}}) {
    const auto n = static_cast<int>(node_of.size());
    std::map<int, std::vector<int>> nodes;
    for (int rank = 0; rank < n; ++rank) nodes[node_of[rank]].push_back(rank);
    int least = n, most = 0;
    for (const auto& [node, ranks] : nodes) {
      least = std::min(least, static_cast<int>(ranks.size()));
      most = std::max(most, static_cast<int>(ranks.size()));
    }
    std::vector<NodeLayout> layouts(node_of.size());
    with_jobs(
        n, DType::kF32, [&](int rank, Job& job) { layouts[rank] = node_layout_of(job.group); },
        node_of);
    for (int rank = 0; rank < n; ++rank) {
      const NodeLayout& layout = layouts[rank];
      const std::vector<int>& ranks = nodes[node_of[rank]];
      const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
      EXPECT_EQ(layout.mine, ranks) << rank;
      EXPECT_EQ(layout.leaders, least);
      EXPECT_EQ(layout.most, most);
      EXPECT_EQ(layout.leads(), place < least) << rank;
      if (!layout.leads()) continue;
      std::vector<int> partners, weights;
      for (const auto& [node, theirs] : nodes) partners.push_back(theirs[place]);
      std::sort(partners.begin(), partners.end());
      for (const int partner : partners)
        weights.push_back(static_cast<int>(nodes[node_of[partner]].size()));
      EXPECT_EQ(layout.partners, partners) << rank;
      EXPECT_EQ(layout.weights, weights) << rank;
    }
  }
}

}  // namespace
}  // namespace bagua
