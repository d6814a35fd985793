// Allreduce with some peers only: every rank ends with the mean of its own values and those that
// it is given this round, see peers.h. Steps: 1. Bytes sent per rank: N for each peer.
//
// Where ranks stand for more than themselves, the mean over all stays what it is, since as much
// flows from one to another as comes back, there or round the circle.
#include "collective/neighbors.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "collective/slices.h"

namespace bagua {
namespace {

// Whether one mean over all of them would move more one way than the other.
bool flows_unevenly(const Job& job, const Meeting& meet) {
  const auto& all = job.weights;
  const bool pair = meet.take_from.size() == 1 && meet.give_to == meet.take_from;
  return !pair && std::adjacent_find(all.begin(), all.end(), std::not_equal_to<>()) != all.end();
}

// How much of another rank's mean goes into mine then.
double share_of(const Job& job, const Meeting& meet, int me, int other) {
  const double mine = job.weight_of(me);
  if (meet.give_to == meet.take_from)
    return std::min<double>(mine, job.weight_of(other)) / (3 * mine);
  return *std::min_element(job.weights.begin(), job.weights.end()) / (2 * mine);
}

}  // namespace

Mean mean_of(const Job& job, const Meeting& meet, int me) {
  Mean mean;
  for (const int rank : meet.take_from) mean.sources.push_back({rank});
  const auto after = std::upper_bound(meet.take_from.begin(), meet.take_from.end(), me);
  mean.sources.insert(mean.sources.begin() + (after - meet.take_from.begin()), {me});
  for (const Mean::Source& source : mean.sources) mean.divisor += job.weight_of(source.rank);
  mean.scaled = flows_unevenly(job, meet);
  if (!mean.scaled) return mean;
  mean.divisor = 1;
  double left = 1;
  for (Mean::Source& source : mean.sources) {
    if (source.rank == me) continue;
    const double share = share_of(job, meet, me, source.rank);
    source.factor = share / job.weight_of(source.rank);  // they give sums
    left -= share;
  }
  for (Mean::Source& source : mean.sources)
    if (source.rank == me) source.factor = left / job.weight_of(me);
  return mean;
}

void neighbors(Job& job) {
  Group& group = job.group;
  const Meeting meet = meeting(job.peers, group.size(), group.me());
  const Mean mean = mean_of(job, meet, group.me());
  const int64_t item = static_cast<int64_t>(job.item()), segment = segment_count(job);
  char* memory = job.scratch.get(Scratch::kReceive, meet.take_from.size() * job.nbytes());

  struct Place {
    int rank;
    char* data;
    double factor;
  };
  std::vector<Place> sources;
  for (const auto& [rank, factor] : mean.sources) {
    sources.push_back({rank, rank == group.me() ? job.data : memory, factor});
    if (rank != group.me()) memory += job.nbytes();
  }
  Finish finish = job.finish;
  finish.divisor = mean.divisor;

  std::vector<std::vector<Ticket>> coming, going;  // by segment
  for (int64_t at = 0; at < job.count; at += segment) {
    const auto nbytes = static_cast<size_t>(std::min(segment, job.count - at) * item);
    coming.emplace_back();
    for (const Place& source : sources)
      if (source.rank != group.me())
        coming.back().push_back(group.recv(source.rank, source.data + at * item, nbytes));
  }
  for (int64_t at = 0; at < job.count; at += segment) {
    const int64_t n = std::min(segment, job.count - at);
    if (job.prepare) job.prepare(at, n);
    going.emplace_back();
    for (const int to : meet.give_to)
      going.back().push_back(group.send(to, job.data + at * item, static_cast<size_t>(n * item)));
  }
  for (size_t number = 0; number < coming.size(); ++number) {
    for (const Ticket ticket : coming[number]) group.wait(ticket);
    for (const Ticket ticket : going[number]) group.wait(ticket);  // what was sent is overwritten
    const int64_t at = static_cast<int64_t>(number) * segment;
    const int64_t n = std::min(segment, job.count - at);
    std::vector<const void*> srcs;
    for (const Place& source : sources) {
      if (mean.scaled) scale(job.dtype, source.data + at * item, n, source.factor);
      srcs.push_back(source.data + at * item);
    }
    if (srcs.size() > 1 || !finish.identity())
      job.reduce(job.data + at * item, srcs.data(), static_cast<int>(srcs.size()), n, finish);
    if (job.arrived) job.arrived(at, n);
  }
}

}  // namespace bagua
