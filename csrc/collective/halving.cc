// Allreduce by recursive halving and doubling (Rabenseifner, 2004). Let p be the largest power of
// two not above n. Ranks beyond p first give all they have to a partner. In step k of log2 p the
// others exchange halves of what they still hold with the one p/2^k places away, and reduce the
// half they keep; then the halves go back the same way, and the partners get the result.
// Steps: 2 log2 p, and 2 more if n is no power of two. Bytes sent per rank: 2 * (p-1)/p * N; by
// those with a partner N more.
#include "collective/pass.h"

namespace bagua {

void halving(Job& job) {
  const int n = job.group.size(), me = job.group.me();
  int p = 1;
  while (2 * p <= n) p *= 2;
  const int extra = n - p;  // ranks 0 to 2 * extra - 1 are partners, two by two
  const Chunk all{job.data, job.count}, none{job.data, 0};
  if (me < 2 * extra && me % 2 == 1) {
    pass(job, me - 1, all.as_raw(), me - 1, none, Landing::kReplace);
    return pass(job, me - 1, none, me - 1, all.as_final(), Landing::kReplace);
  }
  const bool has_partner = me < 2 * extra;
  if (has_partner) pass(job, me + 1, none, me + 1, all.as_raw(), Landing::kReduce);

  const int place = has_partner ? me / 2 : me - extra;  // among the p that are left
  const auto peer_at = [&](int half) {
    const int other = place ^ half;
    return other < extra ? 2 * other : other + extra;
  };
  const auto span = [&](int begin, int count) {
    const int64_t from = slice_of(job.count, p, begin).begin;
    const Slice last = slice_of(job.count, p, begin + count - 1);
    return Chunk{job.data + from * static_cast<int64_t>(job.item()),
                 last.begin + last.count - from};
  };
  int begin = 0;  // of the slices that this rank still holds
  for (int half = p / 2; half > 0; half /= 2) {
    const int keep = begin + (place & half), give = begin + (~place & half);
    const int peer = peer_at(half);
    const bool first = half == p / 2 && !has_partner, last = half == 1;
    pass(job, peer, span(give, half).as_raw(first), peer,
         span(keep, half).as_raw(first).as_final(last), Landing::kReduce,
         last ? job.finish : Finish{});
    begin = keep;
  }
  for (int half = 1; half < p; half *= 2) {
    const int other = begin ^ half;
    const int peer = peer_at(half);
    pass(job, peer, span(begin, half), peer, span(other, half).as_final(), Landing::kReplace);
    begin &= ~half;
  }
  if (has_partner) pass(job, me + 1, all, me + 1, none, Landing::kReplace);
}

}  // namespace bagua
