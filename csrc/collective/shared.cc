// Allreduce over the memory of one node: rank i reduces slice i of everyone and writes it to
// everyone. No message; where all tensors are in arenas, no copy either.
//   in arenas   every byte is read once and written once, as in a memcpy. Steps: 2.
//   elsewhere   what others need goes through the stages, which stay in cache; it may be in
//               fragments. Where everyone's values are in arenas, and only results belong
//               elsewhere, these alone do.
//   small       everyone reads everyone's stage and reduces all of it. Steps: 1.
#include <algorithm>

#include "collective/slices.h"
#include "collective/stage.h"
#include "common/clock.h"
#include "common/memory.h"
#include "common/scaled.h"
#include "kernel/stream.h"

namespace bagua {
namespace {

// Up to this many bytes of all ranks together one step beats two.
constexpr size_t kSmallNbytes = 32 << 10;
// From so many bytes on it is worth finding out whether to write past the caches.
constexpr size_t kVariesNbytes = scaled(1 << 20);

// Slices that begin on cache lines, so that no line is written by two ranks.
Slice lines_of(const Job& job, int i) {
  const int64_t per_line = static_cast<int64_t>(kLineNbytes / job.item());
  const Slice lines = slice_of((job.count + per_line - 1) / per_line, job.group.size(), i);
  const int64_t begin = std::min(lines.begin * per_line, job.count);
  return {begin, std::min((lines.begin + lines.count) * per_line, job.count) - begin};
}

// Calls f(at, count, in, out) for every run of elements in [begin, begin + count) that is in one
// place.
template <class F>
void for_runs(const Job& job, const Slice& slice, F&& f) {
  const auto item = static_cast<int64_t>(job.item());
  const int64_t end = slice.begin + slice.count;
  if (job.fragments.empty()) {
    char* data = job.data + slice.begin * item;
    return f(slice.begin, slice.count, data, data);
  }
  auto fragment = std::upper_bound(
      job.fragments.begin(), job.fragments.end(), slice.begin,
      [](int64_t at, const Fragment& candidate) { return at < candidate.begin + candidate.count; });
  for (; fragment != job.fragments.end() && fragment->begin < end; ++fragment) {
    const int64_t skipped = std::max<int64_t>(slice.begin - fragment->begin, 0);
    const int64_t at = fragment->begin + skipped;
    f(at, std::min(fragment->begin + fragment->count, end) - at, fragment->in + skipped * item,
      fragment->out + skipped * item);
  }
}

void small(Job& job) {
  Group& group = job.group;
  Stage stage(job, kSmallNbytes);
  const auto item = static_cast<int64_t>(job.item());
  for_runs(job, {0, job.count}, [&](int64_t at, int64_t count, const char* in, char*) {
    copy(group, stage.mine() + at * item, in, static_cast<size_t>(count * item));
  });
  stage.first_step();
  std::vector<const void*> srcs(static_cast<size_t>(group.size()));
  for_runs(job, {0, job.count}, [&](int64_t at, int64_t count, const char*, char* out) {
    for (int i = 0; i < group.size(); ++i) srcs[static_cast<size_t>(i)] = stage.of(i) + at * item;
    job.reduce(out, srcs.data(), group.size(), count, job.finish, &group);
  });
  stage.leave();
}

// Writing again what somebody has read waits for their caches; past the caches it does not, but
// what was read has to leave them. Where ranks share a cache the first is faster, elsewhere by far
// the second. `past_caches` is what the first rank chose.
void in_arenas(Job& job, const std::vector<char*>& data, Pace& pace, bool past_caches) {
  Group& group = job.group;
  const Slice slice = lines_of(job, group.me());
  std::vector<void*> targets;
  for (char* base : data) targets.push_back(base + slice.begin * static_cast<int64_t>(job.item()));
  const double began_s = now_s();
  job.reduce({targets.data(), group.size(), past_caches ? group.size() : 0}, targets.data(),
             group.size(), slice.count, job.finish, &group);
  if (past_caches) stream_fence();
  group.step();
  pace.took(past_caches, (now_s() - began_s) / static_cast<double>(job.nbytes()));
}

// In rounds, each over a piece of every slice. My piece of slice i is at place i of my stage; the
// reduced piece of my own slice takes the place where it would have been. With `width` threads of
// every rank pieces are as many times larger, so that each has as much to do as one alone.
// `shown`: where everyone's values are, if all can be seen there. Then two places are used by
// turns, since nothing else tells that a piece has been taken.
void staged(Job& job, int width, const std::vector<char*>& shown) {
  Group& group = job.group;
  const int n = group.size(), me = group.me();
  const auto item = static_cast<int64_t>(job.item());
  const int64_t at_once = static_cast<int64_t>(Stage::kNbytes) * width;
  const auto whole = [](int64_t count) { return std::max<int64_t>((count + 63) / 64, 1) * 64; };
  const int64_t longest = lines_of(job, 0).count;
  const int64_t piece = std::min(whole(at_once / n / item), whole(longest));
  Stage stage(job, static_cast<size_t>(piece * n * item));
  const auto piece_of = [&](int i, int64_t round) {
    const Slice slice = lines_of(job, i);
    const int64_t at = std::min(round * piece, slice.count);
    return Slice{slice.begin + at, std::min(piece, slice.count - at)};
  };
  const auto place_of = [&](int i, int64_t round) {
    return (shown.empty() ? i : round % 2) * piece;
  };
  std::vector<const void*> srcs(static_cast<size_t>(n));
  const int64_t rounds = (longest + piece - 1) / piece;
  Pace& pace = job.scratch.pace(Scratch::Into::kStages, OpKind::kAllreduce, job.nbytes(), width);
  int stream = pace.last();  // until the first rank has said
  double began_s = now_s();
  for (int64_t round = 0; round < rounds; ++round) {
    for (int i = 0; i < n && shown.empty(); ++i) {
      const Slice theirs = piece_of(i, round);
      if (i == me) continue;
      char* place = stage.mine() + (place_of(i, round) - theirs.begin) * item;
      for_runs(job, theirs, [&](int64_t at, int64_t count, const char* in, char*) {
        job.copy(place + at * item, in, static_cast<size_t>(count * item), stream);
      });
    }
    if (stream) stream_fence();
    if (round == 0) {
      const double waits_s = now_s();
      stream = static_cast<int>(stage.first_step(me == 0 ? pace.choose() : 0));
      began_s += now_s() - waits_s;
    } else if (shown.empty()) {
      stage.step();
    }
    const Slice mine = piece_of(me, round);
    for_runs(job, mine, [&](int64_t at, int64_t count, const char* in, char* out) {
      const int64_t place = (place_of(me, round) + at - mine.begin) * item;
      for (int i = 0; i < n; ++i) {
        const auto source = static_cast<size_t>(i);
        srcs[source] = shown.empty() ? stage.of(i) + place : shown[source] + at * item;
      }
      srcs[static_cast<size_t>(me)] = in;
      void* targets[] = {out, stage.mine() + place};
      job.reduce({targets, 2, stream}, srcs.data(), n, count, job.finish, &group);
    });
    if (stream) stream_fence();
    stage.step();
    for (int i = 0; i < n; ++i) {
      const Slice theirs = piece_of(i, round);
      if (i == me) continue;
      const char* place = stage.of(i) + (place_of(i, round) - theirs.begin) * item;
      for_runs(job, theirs, [&](int64_t at, int64_t count, const char*, char* out) {
        job.copy(out, place + at * item, static_cast<size_t>(count * item), false);
      });
    }
  }
  pace.took(stream, (now_s() - began_s) / static_cast<double>(job.nbytes()));
  stage.leave();
}

// What a rank tells the others beside where its values are.
struct Told {
  int threads;
  bool in_place;  // results belong there, too
  bool past_caches;

  int64_t encode() const { return threads * 4 + (in_place ? 2 : 0) + (past_caches ? 1 : 0); }
  static Told of(const Note& note) {
    return {static_cast<int>(note.number / 4), (note.number & 2) != 0, (note.number & 1) != 0};
  }
};

}  // namespace

void shared(Job& job) {
  Group& group = job.group;
  const int n = group.size();
  if (job.nbytes() * static_cast<size_t>(n) <= kSmallNbytes) return small(job);
  group.settle();
  const char* values = job.data;
  if (!values && job.fragments.size() == 1) values = job.fragments[0].in;
  const Place mine = values ? group.node()->arenas()->find(values, job.nbytes()) : Place();
  // What is in many small places is no work for several threads.
  const int threads = job.fragments.size() < 2 ? job.width() : 1;
  Pace& pace = job.scratch.pace(Scratch::Into::kArenas, OpKind::kAllreduce, job.nbytes(), threads);
  const bool varies = job.nbytes() >= kVariesNbytes;
  const bool in_place = job.data && !mine.nowhere();
  const bool past_caches = varies && in_place && group.me() == 0 && pace.choose();
  const Note own{mine, Told{threads, in_place, past_caches}.encode()};
  auto notes = group.step(own);
  notes[static_cast<size_t>(group.me())] = own;
  const auto all = [&](auto&& holds) { return std::all_of(notes.begin(), notes.end(), holds); };
  std::vector<char*> shown;
  if (all([](const Note& note) { return !note.place.nowhere(); }))
    for (int i = 0; i < n; ++i)
      shown.push_back(i == group.me() ? const_cast<char*>(values)
                                      : group.at(i, notes[static_cast<size_t>(i)].place));
  if (!shown.empty() && all([](const Note& note) { return Told::of(note).in_place; }))
    return in_arenas(job, shown, pace, Told::of(notes[0]).past_caches);
  int width = threads;
  for (const Note& note : notes) width = std::min(width, Told::of(note).threads);
  // With fewer threads than ranks pieces of a slice would be too small to share.
  staged(job, width < n ? 1 : width, shown);
}

}  // namespace bagua
