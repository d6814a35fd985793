// The first half of scatter_reduce and all of reducescatter: every rank ends with its own slice
// reduced over all ranks.
#pragma once

#include <functional>
#include <vector>

#include "collective/collective.h"
#include "common/memory.h"
#include "common/scaled.h"

namespace bagua {

// Slice i of `in` starts at element begins[i] and has counts[i] elements; rank i reduces it, in
// rank order, into `out` (which may be its place inside `in`).
struct Slices {
  const char* in;
  std::vector<int64_t> begins;
  std::vector<int64_t> counts;
  char* out;
};

// One such reduction; several may be under way, each of them called for the same things in one
// order on all ranks.
class SliceReducer {
 public:
  // `whole`: everything is received ahead.
  SliceReducer(Job& job, Slices slices, bool whole);

  size_t scratch_nbytes() const {
    return whole_lines(stride_ * static_cast<size_t>(depth_ * peers_));
  }
  void use(char* scratch) { memory_ = scratch; }
  void expect();
  void offer();
  // Whether all is reduced. Calls reduced(begin, count) after each segment, in elements relative to
  // the slice. Waits for what others offer, where it may; else it can be called again.
  bool reduce(const std::function<void(int64_t, int64_t)>& reduced, bool waits = true);
  // Whether the data that was offered may be overwritten.
  bool part(bool waits = true) { return sends_.landed(waits); }

 private:
  void post(int64_t segment);
  size_t index(int64_t segment, int p) const {
    return static_cast<size_t>(segment % depth_ * peers_ + p);
  }

  Job& job_;
  const Slices slices_;
  const int64_t count_;  // of my slice
  const int64_t step_;   // elements of a segment
  const size_t stride_;
  const int peers_;
  const int64_t depth_;                 // segments that are received ahead
  int64_t segment_ = 0, prepared_ = 0;  // the next ones
  char* memory_ = nullptr;
  std::vector<Ticket> tickets_;
  Flight sends_;
};

// A segment is what travels and is reduced at a time: small enough to stay in a core's cache.
constexpr size_t kSegmentNbytes = scaled(512 << 10);
inline int64_t segment_count(const Job& job) {
  return static_cast<int64_t>(kSegmentNbytes / job.item());
}

}  // namespace bagua
