// Allreduce in two halves: rank i reduces slice i of everyone, then sends it to everyone.
// Steps: 2. Bytes sent per rank: 2 * (n-1)/n * N, as few as any allreduce can do. The sum is formed
// once, in rank order, in one place: all ranks end with the same bits, 16-bit floats round once. Of
// several jobs all slices leave before the first result is due.
#include <algorithm>

#include "collective/slices.h"

namespace bagua {
namespace {

Slices slices_of(const Job& job) {
  Slices slices{job.data, {}, {}, nullptr};
  for (int i = 0; i < job.group.size(); ++i) {
    const Slice slice = slice_of(job.count, job.group.size(), i);
    slices.begins.push_back(slice.begin);
    slices.counts.push_back(slice.count);
  }
  slices.out = job.data + slices.begins[job.group.me()] * static_cast<int64_t>(job.item());
  return slices;
}

class ScatterReduce {
 public:
  ScatterReduce(Job& job, bool whole)
      : job_(job),
        group_(job.group),
        slices_(slices_of(job)),
        first_half_(job, slices_, whole),
        shares_(job.group) {}

  size_t scratch_nbytes() const { return first_half_.scratch_nbytes(); }
  void use(char* scratch) { first_half_.use(scratch); }
  void expect() { first_half_.expect(); }
  void offer() { first_half_.offer(); }

  bool reduce_and_share(bool waits) {
    const auto item = static_cast<int64_t>(job_.item());
    const auto share = [&](int64_t at, int64_t count) {
      for (int d = 1; d < group_.size(); ++d)
        shares_.add(group_.send(group_.neighbor(d), slices_.out + at * item,
                                static_cast<size_t>(count * item)));
      if (job_.arrived) job_.arrived(slices_.begins[group_.me()] + at, count);
    };
    if (!first_half_.reduce(share, waits) || !first_half_.part(waits)) return false;
    // Others' slices come to where my part of them has left from.
    const int64_t step = segment_count(job_);
    for (int d = 1; d < group_.size(); ++d) {
      const int from = group_.neighbor(-d);
      for (int64_t at = 0; at < slices_.counts[from]; at += step) {
        const int64_t begin = slices_.begins[from] + at;
        const int64_t count = std::min(step, slices_.counts[from] - at);
        arrivals_.push_back(
            {group_.recv(from, job_.data + begin * item, static_cast<size_t>(count * item)), begin,
             count});
      }
    }
    return true;
  }

  bool take(bool waits) {
    for (; taken_ < arrivals_.size(); ++taken_) {
      Arrival& arrival = arrivals_[taken_];
      if (!group_.here(arrival.ticket, waits)) return false;
      if (job_.arrived) job_.arrived(arrival.begin, arrival.count);
    }
    return shares_.landed(waits);
  }

 private:
  struct Arrival {
    Ticket ticket;
    int64_t begin, count;
  };

  Job& job_;
  Group& group_;
  const Slices slices_;
  SliceReducer first_half_;
  Flight shares_;
  std::vector<Arrival> arrivals_;
  size_t taken_ = 0;  // of them
};

class ScatterReduces : public AllUnderWay<ScatterReduce> {
 public:
  explicit ScatterReduces(const Jobs& jobs)
      : AllUnderWay({&ScatterReduce::reduce_and_share, &ScatterReduce::take}) {
    for (Job* job : jobs) each.emplace_back(*job, /*whole=*/jobs.size() > 1);
    share_out(jobs[0]->scratch, Scratch::kReceive, each);
    for (ScatterReduce& one : each) one.expect();
    for (ScatterReduce& one : each) one.offer();
  }
};

}  // namespace

std::unique_ptr<UnderWay> scatter_reduce(const Jobs& jobs) {
  return std::make_unique<ScatterReduces>(jobs);
}

}  // namespace bagua
