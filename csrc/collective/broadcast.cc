// The root's vector to everyone, down a binomial tree, segment by segment, so that a rank passes
// one segment on while the next one arrives. Virtual rank v = (rank - root) mod n; v's parent is v
// without its lowest set bit.
// Steps: log2(n). Bytes sent per rank: at most log2(n) * N (the root).
#include <algorithm>

#include "collective/slices.h"

namespace bagua {

void broadcast(Job& job) {
  Group& group = job.group;
  const int n = group.size();
  const int v = (group.me() - job.root + n) % n;
  const auto real = [&](int virtual_rank) { return (virtual_rank + job.root) % n; };
  const int low = v == 0 ? n : v & -v;

  const int64_t item = static_cast<int64_t>(job.item());
  const int64_t step = segment_count(job);
  std::vector<Ticket> arrivals;
  for (int64_t at = 0; v != 0 && at < job.count; at += step)
    arrivals.push_back(group.recv(real(v - low), job.data + at * item,
                                  static_cast<size_t>(std::min(step, job.count - at) * item)));
  Flight sends(group);
  for (int64_t at = 0; at < job.count; at += step) {
    if (v != 0) group.wait(arrivals[static_cast<size_t>(at / step)]);
    int top = 1;
    while (top * 2 < std::min(low, n)) top *= 2;
    for (int bit = top; bit > 0; bit /= 2) {
      if (bit >= low || v + bit >= n) continue;
      sends.add(group.send(real(v + bit), job.data + at * item,
                           static_cast<size_t>(std::min(step, job.count - at) * item)));
    }
  }
  sends.wait();
}

}  // namespace bagua
