#include <algorithm>

#include "collective/collective.h"
#include "common/scaled.h"
#include "kernel/half.h"

namespace bagua {
namespace {

// From so many bytes on it pays to wake somebody up, or from fewer that are in more places than
// kFewRows; a piece is what one thread takes at a time.
constexpr int64_t kHelpedNbytes = scaled(1 << 20);
constexpr int64_t kFewRows = 4;
constexpr int64_t kPieceNbytes = scaled(128 << 10);
// Rows of 16-bit floats that one of float32 is worth.
constexpr int64_t kFloatRows = 2;
// Rows whose pieces need no memory to be named.
constexpr int kMostRows = 256;

// Calls work(at, n) for pieces of [0, count) items, each of which is in so many `rows` of memory;
// helpers take some where that pays.
template <class Work>
void divide(const Job& job, int64_t count, int64_t item, int64_t rows, Work&& work) {
  const bool large = count * item * std::max(rows, kFewRows) >= kHelpedNbytes * kFewRows;
  const bool helped = large && job.width() > 1;
  const int64_t at_once = kLongNbytes / item;
  for (int64_t at = 0; at < count; at += at_once) {
    const int64_t part = std::min(at_once, count - at);
    job.group.touch(static_cast<size_t>(part * item * rows));
    if (!helped) {
      work(at, part);
      continue;
    }
    job.crew->share(part, kPieceNbytes / item, [&](int64_t begin, int64_t n) {
      work(at + begin, n);
      stream_fence();  // nobody else's covers what a helper stores past the caches
    });
  }
}

}  // namespace

int Job::width() const { return crew && crew->idle() ? 1 + crew->size() : 1; }

void Job::copy(void* to, const void* from, size_t nbytes, bool past_caches) const {
  divide(*this, static_cast<int64_t>(nbytes), 1, 2, [&](int64_t at, int64_t n) {
    (past_caches ? stream_copy : plain_copy)(static_cast<char*>(to) + at,
                                             static_cast<const char*>(from) + at,
                                             static_cast<size_t>(n), best_isa());
  });
}

void Job::reduce(const Targets& targets, const void* const* srcs, int nsrcs, int64_t n,
                 Finish finish, const Group* of) const {
  const auto step = static_cast<int64_t>(item());
  OddSources odd;
  const int64_t rows = nsrcs + targets.count;
  if (nsrcs > kMostRows || targets.count > kMostRows) {
    group.touch(static_cast<size_t>(rows * n * step));
    bagua::reduce(dtype, op, targets, srcs, nsrcs, n, finish, best_isa(), &odd);
    return note(odd, nsrcs, of);
  }
  divide(*this, n, step, rows, [&](int64_t begin, int64_t count) {
    const void* from[kMostRows];
    void* to[kMostRows];
    for (int i = 0; i < nsrcs; ++i) from[i] = static_cast<const char*>(srcs[i]) + begin * step;
    for (int i = 0; i < targets.count; ++i)
      to[i] = static_cast<char*>(targets.all[i]) + begin * step;
    bagua::reduce(dtype, op, {to, targets.count, targets.streamed}, from, nsrcs, count, finish,
                  best_isa(), &odd);
  });
  note(odd, nsrcs, of);
}

void Job::reduce_wide(float* to, const void* const* srcs, int nsrcs, int64_t n,
                      double factor) const {
  // So many elements stay in L1 between one source and the next.
  constexpr int64_t kBlock = 1024;
  const auto step = static_cast<int64_t>(item());
  OddSources odd;
  divide(*this, n, step, nsrcs + kFloatRows, [&](int64_t begin, int64_t count) {
    float block[kBlock];
    for (int64_t at = begin; at < begin + count; at += kBlock) {
      const int64_t part = std::min(kBlock, begin + count - at);
      const auto source = [&](int i) { return static_cast<const char*>(srcs[i]) + at * step; };
      widen(dtype, to + at, source(0), part);
      for (int i = 1; i < nsrcs; ++i) {
        widen(dtype, block, source(i), part);
        const void* both[] = {to + at, block};
        bagua::reduce(DType::kF32, op, to + at, both, 2, part, {}, best_isa(), &odd);
      }
      if (factor != 1) scale(DType::kF32, to + at, part, factor);
    }
  });
  note(odd, nsrcs, nullptr);
}

void Job::note(const OddSources& odd, int nsrcs, const Group* of) const {
  if (!odd.any()) return;
  const bool known = of && weights.empty() && nsrcs < OddSources::kMost;
  if (!known) return group.odd()->add(OddRanks::kSome);
  bool found = false;
  for (int i = 0; i < nsrcs; ++i) {
    if (!odd.has(i)) continue;
    group.odd()->add(of->rank_of(i));
    found = true;
  }
  if (!found) group.odd()->add(OddRanks::kSome);
}

void Job::narrow(void* to, const float* from, int64_t n) const {
  const auto step = static_cast<int64_t>(item());
  divide(*this, n, step, 1 + kFloatRows, [&](int64_t begin, int64_t count) {
    bagua::narrow(dtype, static_cast<char*>(to) + begin * step, from + begin, count);
  });
}

}  // namespace bagua
