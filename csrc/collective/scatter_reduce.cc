// Allreduce in two halves: rank i reduces slice i of everyone, then sends it to everyone.
// Steps: 2. Bytes sent per rank: 2 * (n-1)/n * N, as few as any allreduce can do. The sum is formed
// once, in rank order, in one place: all ranks end with the same bits, 16-bit floats round once.
#include <algorithm>

#include "collective/slices.h"

namespace bagua {

void scatter_reduce(Job& job) {
  Group& group = job.group;
  const int n = group.size();
  const int64_t item = static_cast<int64_t>(job.item());
  std::vector<int64_t> begins(static_cast<size_t>(n)), counts(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) {
    const Slice slice = slice_of(job.count, n, i);
    begins[i] = slice.begin;
    counts[i] = slice.count;
  }

  Flight shares(group);
  char* mine = job.data + begins[group.me()] * item;
  const auto share = [&](int64_t at, int64_t count) {
    for (int d = 1; d < n; ++d)
      shares.add(
          group.send(group.neighbor(d), mine + at * item, static_cast<size_t>(count * item)));
    if (job.arrived) job.arrived(begins[group.me()] + at, count);
  };
  reduce_slices(job, {job.data, begins, counts, mine}, share);

  struct Arrival {
    Ticket ticket;
    int64_t begin, count;
  };
  std::vector<Arrival> arrivals;
  const int64_t step = segment_count(job);
  for (int d = 1; d < n; ++d) {
    const int from = group.neighbor(-d);
    for (int64_t at = 0; at < counts[from]; at += step) {
      const int64_t begin = begins[from] + at, count = std::min(step, counts[from] - at);
      arrivals.push_back(
          {group.recv(from, job.data + begin * item, static_cast<size_t>(count * item)), begin,
           count});
    }
  }
  for (const Arrival& arrival : arrivals) {
    group.wait(arrival.ticket);
    if (job.arrived) job.arrived(arrival.begin, arrival.count);
  }
  shares.wait();
}

}  // namespace bagua
