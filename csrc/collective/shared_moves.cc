// Broadcast, allgather, alltoall and reducescatter over the memory of one node. What lies in an
// arena is read where it is by whoever wants it: every byte is copied once. Other memory goes
// through the stages, which stay in cache, a piece at a time: every byte is copied twice, the
// second time by whoever wants it; a message would be copied as often, but by one hand after the
// other.
#include <algorithm>

#include "collective/slices.h"
#include "collective/stage.h"
#include "common/clock.h"

namespace bagua {
namespace {

// Up to here a copy costs less than to wait until everybody has read the original.
constexpr int64_t kCopiedNbytes = 64 << 10;

// What one rank gets of another.
struct Run {
  const char* data = nullptr;
  int64_t nbytes = 0;
};

// Every rank gives something to every other one.
class Move {
 public:
  // given[i] is what rank i gets of me; `alike` if all get the same.
  Move(Job& job, OpKind kind, std::vector<Run> given, bool alike)
      : job_(job),
        group_(job.group),
        given_(std::move(given)),
        alike_(alike),
        step_(alike ? kStageNbytes : lines(kStageNbytes / group_.size())),
        sources_(given_.size()) {
    int64_t total = 0;
    for (int i = 0; i < group_.size(); ++i) {
      const Run& run = given_[at(i)];
      most_ = std::max(most_, run.nbytes);
      total += run.nbytes;
      if (i != group_.me())
        shown_ = shown_ && (run.nbytes == 0 || !find(run.data, run.nbytes).nowhere());
    }
    shown_ = shown_ && most_ > kCopiedNbytes;
    const bool given_by_one = kind == OpKind::kBroadcast;
    const size_t nbytes = given_by_one ? job.nbytes() : static_cast<size_t>(total);
    pace_ = &job.scratch.pace(Scratch::Into::kStages, kind, nbytes, job.width());
    past_ = pace_->last();
  }

  // Calls take(begin, nbytes) for one piece of everything after the other: from of(i) on lies what
  // rank i gives me, from byte `begin` on.
  template <class Take>
  void run(Take&& take) {
    group_.settle();
    if (most_ > 0 && !shown_) stage_ = group_.node()->stage(stage_nbytes());
    double began_s = now_s();
    fill(0);
    began_s += meet();
    take(0, step_);
    for (begin_ = step_; begin_ < longest_; begin_ += step_) {
      group_.step();
      fill(begin_);
      group_.step();
      take(begin_, step_);
    }
    stream_fence();
    if (longest_ > 0 && !all_shown_)
      pace_->took(past_, (now_s() - began_s) / static_cast<double>(longest_));
    group_.leave();
    if (shown_) group_.settle();  // the caller may write to it when this is over
  }

  const char* of(int i) const {
    const Source& source = sources_[at(i)];
    return source.shown ? source.data + begin_ : source.data;
  }

 private:
  static constexpr auto kStageNbytes = static_cast<int64_t>(Stage::kNbytes);
  struct Source {
    const char* data = nullptr;  // null: nothing
    bool shown = false;          // where it is, instead of a piece at a time
  };

  static size_t at(int i) { return static_cast<size_t>(i); }
  static int64_t lines(int64_t nbytes) { return std::max<int64_t>(nbytes / 64, 1) * 64; }
  Place find(const char* data, int64_t nbytes) const {
    return group_.node()->arenas()->find(data, static_cast<size_t>(nbytes));
  }
  char* part_of(int i) const { return stage_ + (alike_ ? 0 : i * step_); }
  size_t stage_nbytes() const {
    return static_cast<size_t>(alike_ ? std::min(most_, step_) : step_ * group_.size());
  }

  void fill(int64_t begin) {
    for (int i = 0; stage_ && i < group_.size(); ++i) {
      const int64_t nbytes = std::min(given_[at(i)].nbytes - begin, step_);
      if (i == group_.me() || nbytes <= 0) continue;
      job_.copy(part_of(i), given_[at(i)].data + begin, static_cast<size_t>(nbytes), past_);
      if (alike_) break;
    }
    if (past_) stream_fence();
  }

  // All learn where things are, how long the longest is, and whether stages are written past the
  // caches from now on, which the first rank says. Returns how long it waited.
  double meet() {
    const double waits_s = now_s();
    const int way = group_.me() == 0 ? pace_->choose() : 0;
    const auto notes = group_.step_with([&](int i) {
      const Run& run = given_[at(i)];
      Note note;
      note.number = most_ * 4 + way * 2 + (shown_ ? 1 : 0);
      if (run.nbytes > 0) note.place = shown_ ? find(run.data, run.nbytes) : find(part_of(i), 1);
      return note;
    });
    all_shown_ = shown_ || most_ == 0;
    longest_ = most_;
    if (group_.me() == 0) past_ = way;
    for (int i = 0; i < group_.size(); ++i) {
      if (i == group_.me()) continue;
      const Note& note = notes[at(i)];
      Source& source = sources_[at(i)];
      source.shown = note.number & 1;
      if (!note.place.nowhere()) source.data = group_.at(i, note.place);
      if (i == 0) past_ = static_cast<int>(note.number >> 1 & 1);
      longest_ = std::max(longest_, note.number >> 2);
      all_shown_ = all_shown_ && (source.shown || note.number >> 2 == 0);
    }
    if (all_shown_) step_ = std::max(longest_, step_);
    return now_s() - waits_s;
  }

  Job& job_;
  Group& group_;
  const std::vector<Run> given_;
  const bool alike_;
  int64_t step_;  // the length of a piece
  std::vector<Source> sources_;
  int64_t most_ = 0, longest_ = 0;  // of what I give, of what anybody gives
  bool shown_ = true;               // what I give is read where it is
  bool all_shown_ = false;          // so is what anybody gives
  char* stage_ = nullptr;
  Pace* pace_;
  int past_;  // the caches, into the stage
  int64_t begin_ = 0;
};

std::vector<int64_t> ends_of(const std::vector<int64_t>& counts, size_t item) {
  std::vector<int64_t> ends = {0};
  for (const int64_t count : counts)
    ends.push_back(ends.back() + count * static_cast<int64_t>(item));
  return ends;
}

std::vector<Run> parts_of(const char* data, const std::vector<int64_t>& ends) {
  std::vector<Run> runs;
  for (size_t i = 0; i + 1 < ends.size(); ++i)
    runs.push_back({data + ends[i], ends[i + 1] - ends[i]});
  return runs;
}

// Whether results of so many bytes go past the caches.
bool is_large(int64_t nbytes) { return nbytes >= static_cast<int64_t>(kStreamNbytes); }

// Blocks of everybody, one behind the other.
void take_blocks(Job& job, Move& move, const std::vector<int64_t>& ends) {
  const bool past = is_large(ends.back());
  move.run([&](int64_t begin, int64_t nbytes) {
    for (int d = 1; d < job.group.size(); ++d) {
      const int i = job.group.neighbor(d);
      const int64_t at = ends[static_cast<size_t>(i)] + begin;
      const int64_t left = std::min(nbytes, ends[static_cast<size_t>(i) + 1] - at);
      if (left > 0) job.copy(job.out + at, move.of(i), static_cast<size_t>(left), past);
    }
  });
}

}  // namespace

void shared_broadcast(Job& job) {
  const auto all = static_cast<int64_t>(job.nbytes());
  const bool root = job.group.me() == job.root;
  const Run given{job.data, root ? all : 0};
  Move move(job, OpKind::kBroadcast, std::vector<Run>(job.group.size(), given), true);
  move.run([&](int64_t begin, int64_t nbytes) {
    const int64_t left = std::min(nbytes, all - begin);
    if (!root && left > 0)
      job.copy(job.data + begin, move.of(job.root), static_cast<size_t>(left), is_large(all));
  });
}

void shared_allgather(Job& job) {
  const int me = job.group.me();
  const std::vector<int64_t> ends = ends_of(job.out_counts, job.item());
  const Run mine{job.in, ends[me + 1] - ends[me]};
  copy(job.group, job.out + ends[me], mine.data, static_cast<size_t>(mine.nbytes));
  Move move(job, OpKind::kAllgather, std::vector<Run>(job.group.size(), mine), true);
  take_blocks(job, move, ends);
}

void shared_alltoall(Job& job) {
  const int me = job.group.me();
  const std::vector<int64_t> ins = ends_of(job.in_counts, job.item());
  const std::vector<int64_t> outs = ends_of(job.out_counts, job.item());
  copy(job.group, job.out + outs[me], job.in + ins[me], static_cast<size_t>(ins[me + 1] - ins[me]));
  Move move(job, OpKind::kAlltoall, parts_of(job.in, ins), false);
  take_blocks(job, move, outs);
}

void shared_reducescatter(Job& job) {
  const int n = job.group.size(), me = job.group.me();
  const auto item = static_cast<int64_t>(job.item());
  const std::vector<int64_t> ins = ends_of(job.in_counts, job.item());
  const int64_t mine = ins[me + 1] - ins[me];
  Move move(job, OpKind::kReducescatter, parts_of(job.in, ins), false);
  std::vector<const void*> srcs(static_cast<size_t>(n));
  move.run([&](int64_t begin, int64_t nbytes) {
    const int64_t count = std::min(nbytes, mine - begin) / item;
    if (count <= 0) return;
    for (int i = 0; i < n; ++i)
      srcs[static_cast<size_t>(i)] = i == me ? job.in + ins[me] + begin : move.of(i);
    void* target = job.out + begin;
    job.reduce({&target, 1, is_large(mine) ? 1 : 0}, srcs.data(), n, count, job.finish, &job.group);
  });
}

}  // namespace bagua
