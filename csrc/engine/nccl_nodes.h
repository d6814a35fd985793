// Allreduce through a codec, or with some peers, that is exact inside nodes, on devices of several
// nodes: what `hierarchical` does (csrc/collective), by NCCL. The ranks of a node add up float32
// values into its leaders' slices, leader i of every node exchanges slice i with its counterparts
// so, and gives all of its node the result. Slices are cut where blocks of the codec begin, so
// where there are several leaders blocks are others than on the host. Bytes sent by a node of n
// ranks: 2 (n-1) * N inside of it, in floats, and to others what `compressed`, `sparse` or
// `neighbors` send of one of k ranks.
#pragma once

#include <memory>
#include <vector>

#include "engine/nccl_coded.h"
#include "transport/nccl.h"

namespace bagua {

struct NcclNodes {
  // Where everything goes from now on.
  void use(NcclGroup::Stream stream, bool captured);
  // By all ranks; `on` is where all of them are.
  void allreduce(const OnDevice& on, const Job& job);

  int leaders = 0;                  // on each node, who are the first there
  std::vector<int> weights;         // the ranks of each node, if this one leads
  std::unique_ptr<NcclGroup> near;  // this rank's node's; null if it is alone there
  std::unique_ptr<NcclGroup> far;   // of the leaders in its place; null if it does not lead
};

}  // namespace bagua
