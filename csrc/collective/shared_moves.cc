// Broadcast, allgather, alltoall and reducescatter over the memory of one node, in rounds: what
// others need goes through the stages, which stay in cache. Every byte is copied twice, the second
// time by whoever wants it; a message would be copied as often, but by one hand after the other.
#include <algorithm>

#include "collective/slices.h"
#include "collective/stage.h"

namespace bagua {
namespace {

// Bytes in each round of something that takes several.
struct Rounds {
  int64_t step;
  int64_t count(int64_t nbytes) const { return (nbytes + step - 1) / step; }
  int64_t at(int64_t round, int64_t nbytes) const { return std::min(round * step, nbytes); }
  size_t nbytes(int64_t round, int64_t all) const {
    return static_cast<size_t>(at(round + 1, all) - at(round, all));
  }
};

// Calls fill(round), lets everybody come that far, then take(round). `count` is how many rounds
// this rank needs; the others take part in as many as any of them does.
template <class Fill, class Take>
void in_rounds(Stage& stage, int64_t count, Fill&& fill, Take&& take) {
  fill(0);
  count = stage.first_step(count);
  take(0);
  for (int64_t round = 1; round < count; ++round) {
    stage.step();
    fill(round);
    stage.step();
    take(round);
  }
  stage.leave();
}

std::vector<int64_t> ends_of(const std::vector<int64_t>& counts, size_t item) {
  std::vector<int64_t> ends = {0};
  for (const int64_t count : counts)
    ends.push_back(ends.back() + count * static_cast<int64_t>(item));
  return ends;
}

constexpr Rounds kWhole{static_cast<int64_t>(Stage::kNbytes)};

// For stages that have a part for every rank.
Rounds parts_of(const Job& job) {
  const int64_t step = kWhole.step / job.group.size();
  return {std::max<int64_t>(step / 64, 1) * 64};
}

}  // namespace

void shared_broadcast(Job& job) {
  Group& group = job.group;
  const auto nbytes = static_cast<int64_t>(job.nbytes());
  const bool root = group.me() == job.root;
  Stage stage(job, static_cast<size_t>(std::min(nbytes, kWhole.step)));
  in_rounds(
      stage, kWhole.count(nbytes),
      [&](int64_t round) {
        if (root)
          copy(group, stage.mine(), job.data + kWhole.at(round, nbytes),
               kWhole.nbytes(round, nbytes));
      },
      [&](int64_t round) {
        if (!root)
          copy(group, job.data + kWhole.at(round, nbytes), stage.of(job.root),
               kWhole.nbytes(round, nbytes));
      });
}

void shared_allgather(Job& job) {
  Group& group = job.group;
  const std::vector<int64_t> ends = ends_of(job.out_counts, job.item());
  const auto nbytes_of = [&](int i) { return ends[i + 1] - ends[i]; };
  const int64_t mine = nbytes_of(group.me());
  copy(group, job.out + ends[group.me()], job.in, static_cast<size_t>(mine));
  Stage stage(job, static_cast<size_t>(std::min(mine, kWhole.step)));
  in_rounds(
      stage, kWhole.count(mine),
      [&](int64_t round) {
        copy(group, stage.mine(), job.in + kWhole.at(round, mine), kWhole.nbytes(round, mine));
      },
      [&](int64_t round) {
        for (int d = 1; d < group.size(); ++d) {
          const int i = group.neighbor(d);
          copy(group, job.out + ends[i] + kWhole.at(round, nbytes_of(i)), stage.of(i),
               kWhole.nbytes(round, nbytes_of(i)));
        }
      });
}

void shared_alltoall(Job& job) {
  Group& group = job.group;
  const int me = group.me();
  const Rounds parts = parts_of(job);
  const std::vector<int64_t> ins = ends_of(job.in_counts, job.item());
  const std::vector<int64_t> outs = ends_of(job.out_counts, job.item());
  const auto sent = [&](int i) { return ins[i + 1] - ins[i]; };
  const auto received = [&](int i) { return outs[i + 1] - outs[i]; };
  copy(group, job.out + outs[me], job.in + ins[me], static_cast<size_t>(sent(me)));
  int64_t most = 0;
  for (int i = 0; i < group.size(); ++i)
    if (i != me) most = std::max(most, sent(i));
  Stage stage(job, static_cast<size_t>(parts.step * group.size()));
  in_rounds(
      stage, parts.count(most),
      [&](int64_t round) {
        for (int i = 0; i < group.size(); ++i)
          if (i != me)
            copy(group, stage.mine() + i * parts.step, job.in + ins[i] + parts.at(round, sent(i)),
                 parts.nbytes(round, sent(i)));
      },
      [&](int64_t round) {
        for (int d = 1; d < group.size(); ++d) {
          const int i = group.neighbor(d);
          copy(group, job.out + outs[i] + parts.at(round, received(i)),
               stage.of(i) + me * parts.step, parts.nbytes(round, received(i)));
        }
      });
}

void shared_reducescatter(Job& job) {
  Group& group = job.group;
  const int n = group.size(), me = group.me();
  const auto item = static_cast<int64_t>(job.item());
  const Rounds parts = parts_of(job);
  const std::vector<int64_t> ins = ends_of(job.in_counts, job.item());
  const auto nbytes_of = [&](int i) { return ins[i + 1] - ins[i]; };
  int64_t most = 0;
  for (int i = 0; i < n; ++i) most = std::max(most, nbytes_of(i));
  Stage stage(job, static_cast<size_t>(parts.step * n));
  std::vector<const void*> srcs(static_cast<size_t>(n));
  in_rounds(
      stage, parts.count(most),
      [&](int64_t round) {
        for (int i = 0; i < n; ++i)
          if (i != me)
            copy(group, stage.mine() + i * parts.step,
                 job.in + ins[i] + parts.at(round, nbytes_of(i)),
                 parts.nbytes(round, nbytes_of(i)));
      },
      [&](int64_t round) {
        const int64_t at = parts.at(round, nbytes_of(me));
        for (int i = 0; i < n; ++i)
          srcs[static_cast<size_t>(i)] =
              i == me ? job.in + ins[me] + at : stage.of(i) + me * parts.step;
        job.reduce(job.out + at, srcs.data(), n,
                   static_cast<int64_t>(parts.nbytes(round, nbytes_of(me))) / item, job.finish);
      });
}

}  // namespace bagua
