// Ring allreduce (Patarasuk and Yuan, 2009). The vector is cut into n chunks. In reduce step s
// rank r sends chunk r-s to its right and adds what its left sent to chunk r-s-1; after n-1 steps
// it holds chunk r+1 complete, and n-1 more steps pass the finished chunks round.
// Steps: 2(n-1). Bytes sent per rank: 2 * (n-1)/n * N, to one neighbour only.
#include "collective/pass.h"

namespace bagua {

void ring(Job& job) {
  const int n = job.group.size(), me = job.group.me();
  const int right = job.group.neighbor(1), left = job.group.neighbor(-1);
  const auto chunk = [&](int index) {
    const Slice slice = slice_of(job.count, n, (index % n + n) % n);
    return Chunk{job.data + slice.begin * static_cast<int64_t>(job.item()), slice.count};
  };
  for (int s = 0; s < n - 1; ++s) {
    const bool last = s == n - 2;
    pass(job, right, chunk(me - s).as_raw(s == 0), left, chunk(me - s - 1).as_raw().as_final(last),
         Landing::kReduce, last ? job.finish : Finish{});
  }
  for (int s = 0; s < n - 1; ++s)
    pass(job, right, chunk(me + 1 - s), left, chunk(me - s).as_final(), Landing::kReplace);
}

}  // namespace bagua
