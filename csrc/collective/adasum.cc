// Adasum (Maleki et al., 2021): instead of a + b, a*(1 - a.b/2|a|^2) + b*(1 - a.b/2|b|^2), applied
// pairwise up a tree of ranks. Partners exchange whole vectors and both compute the same result.
// With n not a power of two, each rank past the largest power p first folds into rank - p.
// Steps: log2(n) (+2). Bytes sent per rank: log2(n) * N.
#include "collective/collective.h"

namespace bagua {
namespace {

// a <- adasum(a, b); `lower` says whether a is the lower rank's, so that both sides round alike.
void merge(Job& job, char* theirs, bool lower) {
  const char* a = lower ? job.data : theirs;
  const char* b = lower ? theirs : job.data;
  const Dots d = dots(job.dtype, a, b, job.count);
  const double ca = d.aa > 0 ? 1 - d.ab / (2 * d.aa) : 1;
  const double cb = d.bb > 0 ? 1 - d.ab / (2 * d.bb) : 1;
  if (lower) {
    combine(job.dtype, job.data, theirs, ca, cb, job.count);
  } else {
    combine(job.dtype, job.data, theirs, cb, ca, job.count);
  }
}

void swap_with(Job& job, int partner, char* theirs) {
  Flight flight(job.group);
  flight.add(job.group.recv(partner, theirs, job.nbytes()));
  flight.add(job.group.send(partner, job.data, job.nbytes()));
  flight.wait();
}

}  // namespace

void adasum(Job& job) {
  Group& group = job.group;
  const int n = group.size(), me = group.me();
  char* theirs = job.scratch.get(Scratch::kReceive, job.nbytes());
  int power = 1;
  while (power * 2 <= n) power *= 2;

  if (me >= power) {
    group.wait(group.send(me - power, job.data, job.nbytes()));
    group.wait(group.recv(me - power, job.data, job.nbytes()));
    return;
  }
  if (me + power < n) {
    group.wait(group.recv(me + power, theirs, job.nbytes()));
    merge(job, theirs, true);
  }
  for (int distance = 1; distance < power; distance *= 2) {
    const int partner = me ^ distance;
    swap_with(job, partner, theirs);
    merge(job, theirs, me < partner);
  }
  scale(job.dtype, job.data, job.count, job.finish.factor / job.finish.divisor);
  if (me + power < n) group.wait(group.send(me + power, job.data, job.nbytes()));
}

}  // namespace bagua
