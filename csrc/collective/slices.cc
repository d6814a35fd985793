#include "collective/slices.h"

#include <algorithm>
#include <utility>

namespace bagua {
namespace {

int64_t depth_of(int64_t segments, size_t nbytes_of_one, bool whole) {
  if (whole) return segments;
  const size_t fit = kAheadNbytes / std::max<size_t>(nbytes_of_one, 1);
  return std::clamp<int64_t>(static_cast<int64_t>(fit), 2, std::max<int64_t>(2, segments));
}

}  // namespace

SliceReducer::SliceReducer(Job& job, Slices slices, bool whole)
    : job_(job),
      slices_(std::move(slices)),
      count_(slices_.counts[job.group.me()]),
      step_(std::min(segment_count(job), std::max<int64_t>(count_, 1))),
      stride_(static_cast<size_t>(step_) * job.item()),
      peers_(job.group.size() - 1),
      depth_(depth_of((count_ + step_ - 1) / step_, stride_ * static_cast<size_t>(peers_), whole)),
      tickets_(static_cast<size_t>(depth_ * peers_)),
      sends_(job.group) {}

void SliceReducer::expect() {
  for (int64_t segment = 0; segment < depth_; ++segment) post(segment);
}

void SliceReducer::post(int64_t segment) {
  const int64_t begin = segment * step_;
  if (begin >= count_) return;
  const int64_t count = std::min(step_, count_ - begin);
  for (int p = 0; p < peers_; ++p) {
    const int from = job_.group.neighbor(-(p + 1));
    tickets_[index(segment, p)] = job_.group.recv(from, memory_ + stride_ * index(segment, p),
                                                  static_cast<size_t>(count) * job_.item());
  }
}

void SliceReducer::offer() {
  const auto item = static_cast<int64_t>(job_.item());
  const int64_t step = segment_count(job_);
  for (int d = 1; d <= peers_; ++d) {
    const int to = job_.group.neighbor(d);
    const char* slice = slices_.in + slices_.begins[to] * item;
    for (int64_t at = 0; at < slices_.counts[to]; at += step) {
      const int64_t count = std::min(step, slices_.counts[to] - at);
      if (job_.prepare) job_.prepare(slices_.begins[to] + at, count);
      sends_.add(job_.group.send(to, slice + at * item, static_cast<size_t>(count * item)));
    }
  }
}

bool SliceReducer::reduce(const std::function<void(int64_t, int64_t)>& reduced, bool waits) {
  const int me = job_.group.me();
  const auto item = static_cast<int64_t>(job_.item());
  std::vector<const void*> srcs(static_cast<size_t>(peers_ + 1));
  const char* own = slices_.in + slices_.begins[me] * item;
  for (; segment_ * step_ < count_; ++segment_) {
    const int64_t at = segment_ * step_, count = std::min(step_, count_ - at);
    if (prepared_ == segment_) {
      if (job_.prepare) job_.prepare(slices_.begins[me] + at, count);
      ++prepared_;
    }
    for (int p = 0; p < peers_; ++p) {
      if (!job_.group.here(tickets_[index(segment_, p)], waits)) return false;
      srcs[job_.group.neighbor(-(p + 1))] = memory_ + stride_ * index(segment_, p);
    }
    srcs[me] = own + at * item;
    job_.reduce(slices_.out + at * item, srcs.data(), peers_ + 1, count, job_.finish, &job_.group);
    post(segment_ + depth_);  // where this one was
    reduced(at, count);
  }
  return true;
}

}  // namespace bagua
