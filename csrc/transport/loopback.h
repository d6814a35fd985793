// Ranks are threads of one process: for tests of everything above, fast and open to sanitizers.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "transport/node.h"
#include "transport/transport.h"

namespace bagua {

// The wires between the ranks of one loopback world.
class LoopbackHub {
 public:
  // With `node_of`, the node of each rank, the ranks of a node share memory as processes would. Who
  // is alone on its node has none to share.
  explicit LoopbackHub(int size, const std::vector<int>& node_of = {});
  int size() const { return size_; }
  std::unique_ptr<Transport> connect(int rank);

 private:
  friend class LoopbackTransport;
  const int size_;
  const std::vector<int> node_of_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Node>> nodes_;  // by rank, until it connects
  // Messages sent and not yet received, per (from, to, track). Guarded by mutex_.
  std::map<std::tuple<int, int, int>, std::deque<std::vector<char>>> wires_;
};

}  // namespace bagua
