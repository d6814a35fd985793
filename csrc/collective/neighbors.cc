// Allreduce with some peers only: every rank ends with the mean of its own values and those that
// it is given this round, see peers.h. Steps: 1. Bytes sent per rank: N for each peer.
//
// Where ranks stand for more than themselves, the mean over all stays what it is, since as much
// flows from one to another as comes back, there or round the circle.
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
double share_of(const Job& job, const Meeting& meet, int other) {
  const double mine = job.weight_of(job.group.me());
  if (meet.give_to == meet.take_from)
    return std::min<double>(mine, job.weight_of(other)) / (3 * mine);
  return *std::min_element(job.weights.begin(), job.weights.end()) / (2 * mine);
}

}  // namespace

void neighbors(Job& job) {
  Group& group = job.group;
  const Meeting meet = meeting(job.peers, group.size(), group.me());
  const int64_t item = static_cast<int64_t>(job.item()), segment = segment_count(job);
  char* memory = job.scratch.get(Scratch::kReceive, meet.take_from.size() * job.nbytes());

  struct Source {
    int rank;
    char* data;
    double factor = 1;
  };
  std::vector<Source> sources;  // in the order of ranks
  for (const int rank : meet.take_from)
    sources.push_back({rank, memory + static_cast<int64_t>(sources.size()) * job.count * item});
  const auto after = std::upper_bound(meet.take_from.begin(), meet.take_from.end(), group.me());
  sources.insert(sources.begin() + (after - meet.take_from.begin()), {group.me(), job.data});
  Finish finish = job.finish;
  finish.divisor = 0;
  for (const Source& source : sources) finish.divisor += job.weight_of(source.rank);
  const bool uneven = flows_unevenly(job, meet);
  if (uneven) {
    finish.divisor = 1;
    double left = 1;
    for (Source& source : sources) {
      if (source.rank == group.me()) continue;
      const double share = share_of(job, meet, source.rank);
      source.factor = share / job.weight_of(source.rank);  // they give sums
      left -= share;
    }
    for (Source& source : sources)
      if (source.rank == group.me()) source.factor = left / job.weight_of(source.rank);
  }

  std::vector<std::vector<Ticket>> coming, going;  // by segment
  for (int64_t at = 0; at < job.count; at += segment) {
    const auto nbytes = static_cast<size_t>(std::min(segment, job.count - at) * item);
    coming.emplace_back();
    for (const Source& source : sources)
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
    for (const Source& source : sources) {
      if (uneven) scale(job.dtype, source.data + at * item, n, source.factor);
      srcs.push_back(source.data + at * item);
    }
    if (srcs.size() > 1 || !finish.identity())
      job.reduce(job.data + at * item, srcs.data(), static_cast<int>(srcs.size()), n, finish);
    if (job.arrived) job.arrived(at, n);
  }
}

}  // namespace bagua
