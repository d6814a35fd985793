// Every rank's block to everyone; blocks may have any size.
// Steps: 1. Bytes sent per rank: (n-1) times its block.
#include "collective/collective.h"

namespace bagua {

void allgather(Job& job) {
  Group& group = job.group;
  const int n = group.size(), me = group.me();
  const int64_t item = static_cast<int64_t>(job.item());
  std::vector<int64_t> to(static_cast<size_t>(n));
  for (int i = 1; i < n; ++i) to[i] = to[i - 1] + job.out_counts[i - 1];
  const size_t mine = static_cast<size_t>(job.out_counts[me] * item);
  Flight flight(group);
  for (int d = 1; d < n; ++d) {
    const int peer = group.neighbor(-d);
    if (job.out_counts[peer] > 0)
      flight.add(group.recv(peer, job.out + to[peer] * item,
                            static_cast<size_t>(job.out_counts[peer] * item)));
  }
  for (int d = 1; d < n; ++d)
    if (mine > 0) flight.add(group.send(group.neighbor(d), job.in, mine));
  copy(group, job.out + to[me] * item, job.in, mine);
  flight.wait();
}

}  // namespace bagua
