// Every rank sends block i of its vector to rank i; blocks may have any size.
// Steps: 1. Bytes sent per rank: its vector less its own block.
#include "collective/collective.h"

namespace bagua {

void alltoall(Job& job) {
  Group& group = job.group;
  const int n = group.size(), me = group.me();
  const int64_t item = static_cast<int64_t>(job.item());
  std::vector<int64_t> from(static_cast<size_t>(n)), to(static_cast<size_t>(n));
  for (int i = 1; i < n; ++i) {
    from[i] = from[i - 1] + job.in_counts[i - 1];
    to[i] = to[i - 1] + job.out_counts[i - 1];
  }
  Flight flight(group);
  for (int d = 1; d < n; ++d) {
    const int peer = group.neighbor(-d);
    if (job.out_counts[peer] > 0)
      flight.add(group.recv(peer, job.out + to[peer] * item,
                            static_cast<size_t>(job.out_counts[peer] * item)));
  }
  for (int d = 1; d < n; ++d) {
    const int peer = group.neighbor(d);
    if (job.in_counts[peer] > 0)
      flight.add(group.send(peer, job.in + from[peer] * item,
                            static_cast<size_t>(job.in_counts[peer] * item)));
  }
  copy(group, job.out + to[me] * item, job.in + from[me] * item,
       static_cast<size_t>(job.in_counts[me] * item));
  flight.wait();
}

}  // namespace bagua
