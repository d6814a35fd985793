// Who of a group is on which node, and who leads there: there are as many leaders on every node as
// the smallest has ranks, and leader i of each exchanges slice i with its counterparts.
#pragma once

#include <vector>

#include "transport/group.h"

namespace bagua {

struct NodeLayout {
  std::vector<int> mine;      // group indices on this node, ascending; the first of them lead
  std::vector<int> partners;  // those in my place on every node, ascending, if I am a leader
  std::vector<int> weights;   // the ranks of each partner's node
  int leaders;
  int most = 1;  // ranks on a node

  bool leads() const { return !partners.empty(); }
};

NodeLayout node_layout_of(const Group& group);

}  // namespace bagua
