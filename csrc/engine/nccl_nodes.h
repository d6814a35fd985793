// Allreduce through a codec that is exact inside nodes, on devices of several nodes: what
// `hierarchical` does (csrc/collective), by NCCL. The ranks of a node add up float32 values into
// its leaders' slices, leader i of every node exchanges slice i with its counterparts through the
// codec, and gives all of its node the result. Slices are cut where blocks of the codec begin, so
// where there are several leaders blocks are others than on the host. Bytes sent by a node of n
// ranks: 2 (n-1) * N inside of it, in floats, and to k-1 others what `compressed` or `sparse` send
// of one of k ranks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/node_layout.h"
#include "engine/nccl_coded.h"
#include "transport/nccl.h"

namespace bagua {

// The two groups that a rank is in for it: its node's, and that of the leaders in its place.
class NcclNodes {
 public:
  NcclNodes(const NcclLibrary& library, Device& device, const Group& group,
            NcclGroup::WaitUntil wait_until);
  // Makes them of the group of all, called by all, when nothing of that is under way. Why it did
  // not work, on whichever rank, or nothing: then that group may only end, too.
  std::string split(NcclGroup& all, Group& group);
  int leaders() const { return layout_.leaders; }

  // Where everything goes from now on.
  void use(NcclGroup::Stream stream, bool captured) {
    for (auto& group : groups_) group->use(stream, captured);
  }
  // By all ranks; `on` is where all of them are.
  void allreduce(const OnDevice& on, const Job& job);
  // One for each that this rank is in.
  std::vector<std::unique_ptr<NcclGroup>>& groups() { return groups_; }

 private:
  std::string add(NcclGroup*& group, NcclGroup& all, const std::vector<int>& members,
                  const std::function<bool()>& pointless);

  const NcclLibrary& library_;
  Device& device_;
  const NodeLayout layout_;
  const int me_;
  const NcclGroup::WaitUntil wait_until_;
  std::vector<std::unique_ptr<NcclGroup>> groups_;
  NcclGroup* near_ = nullptr;  // null for a rank alone on its node
  NcclGroup* far_ = nullptr;   // null for one that does not lead
};

}  // namespace bagua
