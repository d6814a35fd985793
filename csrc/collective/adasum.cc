// Adasum (Maleki et al., 2021): instead of a + b, a*(1 - a.b/2|a|^2) + b*(1 - a.b/2|b|^2), applied
// pairwise up a tree of ranks. Of long vectors, partners take a half each, then halves of halves;
// how alike whole vectors are they learn by adding up what each finds in its part. Of short ones
// both do all of it. With n not a power of two, each rank past the largest power p first folds into
// rank - p. Steps: log2(n) (+2); twice that and log2(n)^2 / 2 sums of 24 bytes where all is halved.
// Bytes sent per rank: log2(n) N, or 2 (p-1)/p N.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "collective/pass.h"
#include "common/memory.h"

namespace bagua {
namespace {

// What is less is not halved: its way takes longer than its bytes.
constexpr int64_t kHalvedNbytes = 32 << 10;

// A step up the tree in which the partner took the other half.
struct Halving {
  int partner;
  Slice theirs;
};

class Tree {
 public:
  explicit Tree(Job& job)
      : job_(job),
        group_(job.group),
        item_(static_cast<int64_t>(job.item())),
        mine_{0, job.count},
        theirs_(job.scratch.get(Scratch::kReceive, whole_lines(job.nbytes()) + 2 * sizeof(Dots))),
        sums_(reinterpret_cast<Dots*>(theirs_ + whole_lines(job.nbytes()))) {}

  void climb(int partner) {
    const bool lower = group_.me() < partner;
    // What is left of an odd number differs between ranks, which all do the same.
    if ((job_.count * item_) >> halvings_.size() < kHalvedNbytes) {
      swap(partner, mine_, mine_, theirs_);
    } else {
      Slice low{mine_.begin, mine_.count / 2};
      Slice high{low.begin + low.count, mine_.count - low.count};
      halvings_.push_back({partner, lower ? high : low});
      mine_ = lower ? low : high;
      swap(partner, halvings_.back().theirs, mine_, theirs_);
    }
    merge(lower);
  }

  // The vector of a rank that takes no part in the rest.
  void take_in(int rank) {
    group_.wait(group_.recv(rank, theirs_, job_.nbytes()));
    note(rank, merge(true).bb);
  }

  void finish() {
    scale(job_.dtype, job_.data + mine_.begin * item_, mine_.count,
          job_.finish.factor / job_.finish.divisor);
    for (; !halvings_.empty(); halvings_.pop_back()) {
      const auto [partner, theirs] = halvings_.back();
      swap(partner, mine_, theirs, job_.data);
      mine_ = {std::min(mine_.begin, theirs.begin), mine_.count + theirs.count};
    }
  }

 private:
  void swap(int partner, Slice out, Slice in, char* to) {
    pass(job_, partner, {job_.data + out.begin * item_, out.count}, partner,
         {to + in.begin * item_, in.count}, Landing::kReplace);
  }

  // a <- adasum(a, b); `lower` says whether a is the lower rank's, so that both sides round alike.
  Dots merge(bool lower) {
    char* own = job_.data + mine_.begin * item_;
    const char* other = theirs_ + mine_.begin * item_;
    const Dots d = add_up(dots(job_.dtype, lower ? own : other, lower ? other : own, mine_.count));
    if (std::exchange(is_leaf_, false)) note(group_.me(), lower ? d.aa : d.bb);
    const double ca = d.aa > 0 ? 1 - d.ab / (2 * d.aa) : 1;
    const double cb = d.bb > 0 ? 1 - d.ab / (2 * d.bb) : 1;
    combine(job_.dtype, own, other, lower ? ca : cb, lower ? cb : ca, mine_.count);
    return d;
  }

  // A rank's vector is no numbers. Further up the tree it would be that of many.
  void note(int rank, double square) {
    if (!std::isfinite(square)) group_.odd()->add(group_.rank_of(rank));
  }

  // What others find in the parts they have taken counts, too. All add up alike: x + y is y + x.
  Dots add_up(const Dots& part) {
    sums_[0] = part;
    for (const Halving& halving : halvings_) {
      Flight flight(group_);
      flight.add(group_.recv(halving.partner, reinterpret_cast<char*>(&sums_[1]), sizeof(Dots)));
      flight.add(group_.send(halving.partner, reinterpret_cast<char*>(&sums_[0]), sizeof(Dots)));
      flight.wait();
      sums_[0] = {sums_[0].ab + sums_[1].ab, sums_[0].aa + sums_[1].aa, sums_[0].bb + sums_[1].bb};
    }
    return sums_[0];
  }

  Job& job_;
  Group& group_;
  const int64_t item_;
  Slice mine_;
  char* const theirs_;
  Dots* const sums_;  // of this rank and of a partner
  std::vector<Halving> halvings_;
  bool is_leaf_ = true;  // nothing has been merged into this rank's vector
};

}  // namespace

void adasum(Job& job) {
  Group& group = job.group;
  const int n = group.size(), me = group.me();
  int power = 1;
  while (power * 2 <= n) power *= 2;
  if (me >= power) {
    group.wait(group.send(me - power, job.data, job.nbytes()));
    group.wait(group.recv(me - power, job.data, job.nbytes()));
    return;
  }
  Tree tree(job);
  if (me + power < n) tree.take_in(me + power);
  for (int distance = 1; distance < power; distance *= 2) tree.climb(me ^ distance);
  tree.finish();
  if (me + power < n) group.wait(group.send(me + power, job.data, job.nbytes()));
}

}  // namespace bagua
