// Ring allreduce (Patarasuk and Yuan, 2009). The vector is cut into n chunks. In reduce step s
// rank r sends chunk r-s to its right and adds what its left sent to chunk r-s-1; after n-1 steps
// it holds chunk r+1 complete, and n-1 more steps pass the finished chunks round.
// Steps: 2(n-1). Bytes sent per rank: 2 * (n-1)/n * N, to one neighbour only.
#include <algorithm>

#include "collective/slices.h"

namespace bagua {
namespace {

struct Piece {
  char* data;
  int64_t count;
};

Piece chunk(const Job& job, int index) {
  const int n = job.group.size();
  const Slice slice = slice_of(job.count, n, ((index % n) + n) % n);
  return {job.data + slice.begin * static_cast<int64_t>(job.item()), slice.count};
}

// Sends `out` to the right while `in` comes from the left, segment by segment, so that adding one
// segment overlaps the next one's journey. `incoming` is where segments land.
template <class Landed>
void pass(Job& job, Piece out, Piece in, char* incoming, bool keep_all, Landed&& landed) {
  Group& group = job.group;
  const int64_t item = static_cast<int64_t>(job.item());
  const int64_t step = segment_count(job);
  const int right = group.neighbor(1), left = group.neighbor(-1);
  Flight sends(group);
  for (int64_t at = 0; at < out.count; at += step) {
    const int64_t count = std::min(step, out.count - at);
    sends.add(group.send(right, out.data + at * item, static_cast<size_t>(count * item)));
  }
  const auto place = [&](int64_t at) {
    return incoming + (keep_all ? at : at / step % 2 * step) * item;
  };
  const auto post = [&](int64_t at) {
    const int64_t count = std::min(step, in.count - at);
    return group.recv(left, place(at), static_cast<size_t>(count * item));
  };
  Ticket posted[2] = {};
  for (int64_t at = 0; at < in.count && at < 2 * step; at += step) posted[at / step] = post(at);
  for (int64_t at = 0; at < in.count; at += step) {
    group.wait(posted[at / step % 2]);
    landed(at, std::min(step, in.count - at), place(at));
    if (at + 2 * step < in.count) posted[at / step % 2] = post(at + 2 * step);
  }
  sends.wait();
}

}  // namespace

void ring(Job& job) {
  Group& group = job.group;
  const int n = group.size(), me = group.me();
  const int64_t item = static_cast<int64_t>(job.item());
  char* landing = job.scratch.get(Scratch::kReceive, 2 * kSegmentNbytes);
  for (int s = 0; s < n - 1; ++s) {
    const Piece in = chunk(job, me - s - 1);
    const Finish finish = s == n - 2 ? job.finish : Finish{};
    pass(job, chunk(job, me - s), in, landing, false,
         [&](int64_t at, int64_t count, const char* segment) {
           char* mine = in.data + at * item;
           const void* srcs[] = {segment, mine};
           reduce(job.dtype, job.op, mine, srcs, 2, count, finish);
         });
  }
  for (int s = 0; s < n - 1; ++s) {
    const Piece in = chunk(job, me - s);
    pass(job, chunk(job, me + 1 - s), in, in.data, true, [](int64_t, int64_t, const char*) {});
  }
}

}  // namespace bagua
