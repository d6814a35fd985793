// Every rank reduces its own slice of everyone's vector, in rank order.
// Steps: 1. Bytes sent per rank: (n-1)/n * N.
#include "collective/slices.h"

namespace bagua {

void reducescatter(Job& job) {
  std::vector<int64_t> begins(job.in_counts.size());
  for (size_t i = 1; i < begins.size(); ++i) begins[i] = begins[i - 1] + job.in_counts[i - 1];
  SliceReducer mine(job, {job.in, begins, job.in_counts, job.out}, /*whole=*/false);
  mine.use(job.scratch.get(Scratch::kReceive, mine.scratch_nbytes()));
  mine.expect();
  mine.offer();
  mine.reduce([](int64_t, int64_t) {});
  mine.part();
}

}  // namespace bagua
