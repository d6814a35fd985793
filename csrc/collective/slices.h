// The first half of scatter_reduce and all of reducescatter: every rank ends with its own slice
// reduced over all ranks.
#pragma once

#include <functional>

#include "collective/collective.h"

namespace bagua {

// Slice i of `in` starts at element begins[i] and has counts[i] elements; rank i reduces it, in
// rank order, into `out` (which may be its place inside `in`), one segment at a time.
// `reduced(begin, count)` is called after each segment, in elements relative to the slice.
// The data being sent may be overwritten once this returns.
struct Slices {
  const char* in;
  const std::vector<int64_t>& begins;
  const std::vector<int64_t>& counts;
  char* out;
};
void reduce_slices(Job& job, const Slices& slices,
                   const std::function<void(int64_t, int64_t)>& reduced);

// Receives into scratch are posted for so many bytes ahead. What arrives before it is waited for
// costs MPI memory and copies, and who sends nothing unasked queues its questions behind the data:
// with more than that under way, links of 1 Gbit/s were idle for a third of the time.
constexpr size_t kAheadNbytes = 64 << 20;

// A segment is what travels and is reduced at a time: small enough to stay in a core's cache.
constexpr size_t kSegmentNbytes = 512 << 10;
inline int64_t segment_count(const Job& job) {
  return static_cast<int64_t>(kSegmentNbytes / job.item());
}

}  // namespace bagua
