// Ranks are threads of one process: for tests of everything above, fast and open to sanitizers.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/transport.h"

namespace bagua {

// The wires between the ranks of one loopback world.
class LoopbackHub {
 public:
  explicit LoopbackHub(int size) : size_(size) {}
  int size() const { return size_; }
  std::unique_ptr<Transport> connect(int rank);

 private:
  friend class LoopbackTransport;
  const int size_;
  std::mutex mutex_;
  // Messages sent and not yet received, per (from, to). Guarded by mutex_.
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> wires_;
};

}  // namespace bagua
