// Everyone sends its whole vector to everyone and reduces all of them in rank order.
// Steps: 1. Bytes sent per rank: (n-1) * N. For vectors so small that only latency counts.
#include "collective/collective.h"

namespace bagua {

void gather_reduce(Job& job) {
  Group& group = job.group;
  const int n = group.size();
  const size_t nbytes = job.nbytes();
  // My own vector is copied aside, so that the result can be written while sends are in flight.
  char* scratch = job.scratch.get(Scratch::kReceive, nbytes * static_cast<size_t>(n));
  std::vector<const void*> srcs(static_cast<size_t>(n));
  Flight flight(group);
  for (int i = 0; i < n; ++i) srcs[i] = scratch + nbytes * static_cast<size_t>(i);
  char* mine = scratch + nbytes * static_cast<size_t>(group.me());
  copy(group, mine, job.data, nbytes);
  for (int d = 1; d < n; ++d) {
    const int from = group.neighbor(-d);
    flight.add(group.recv(from, scratch + nbytes * static_cast<size_t>(from), nbytes));
  }
  for (int d = 1; d < n; ++d) flight.add(group.send(group.neighbor(d), mine, nbytes));
  flight.wait();
  job.reduce(job.data, srcs.data(), n, job.count, job.finish, &job.group);
}

}  // namespace bagua
