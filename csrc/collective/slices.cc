#include "collective/slices.h"

#include <algorithm>

namespace bagua {
namespace {

// Receives segments of my slice from every peer, many ahead.
class SegmentReceiver {
 public:
  SegmentReceiver(Job& job, int64_t slice_count)
      : job_(job),
        step_(std::min(segment_count(job), std::max<int64_t>(slice_count, 1))),
        slice_count_(slice_count),
        stride_(static_cast<size_t>(step_) * job.item()),
        peers_(job.group.size() - 1),
        depth_(std::clamp<int64_t>(
            static_cast<int64_t>(kAheadNbytes /
                                 std::max<size_t>(stride_ * static_cast<size_t>(peers_), 1)),
            2, std::max<int64_t>(2, (slice_count + step_ - 1) / step_))),
        memory_(job.scratch.get(Scratch::kReceive, stride_ * static_cast<size_t>(depth_ * peers_))),
        tickets_(static_cast<size_t>(depth_ * peers_)) {
    for (int64_t segment = 0; segment < depth_; ++segment) post(segment);
  }

  int64_t step() const { return step_; }
  // The memory of this segment is free for a later one.
  void release(int64_t segment) { post(segment + depth_); }

  // Waits for a posted segment; srcs[i] becomes rank i's copy of it (mine is left alone).
  void wait(int64_t segment, std::vector<const void*>& srcs) {
    for (int p = 0; p < peers_; ++p) {
      job_.group.wait(tickets_[index(segment, p)]);
      srcs[job_.group.neighbor(-(p + 1))] = memory_ + stride_ * index(segment, p);
    }
  }

 private:
  void post(int64_t segment) {
    const int64_t begin = segment * step_;
    if (begin >= slice_count_) return;
    const int64_t count = std::min(step_, slice_count_ - begin);
    for (int p = 0; p < peers_; ++p) {
      const int from = job_.group.neighbor(-(p + 1));
      tickets_[index(segment, p)] = job_.group.recv(from, memory_ + stride_ * index(segment, p),
                                                    static_cast<size_t>(count) * job_.item());
    }
  }

  size_t index(int64_t segment, int p) const {
    return static_cast<size_t>(segment % depth_ * peers_ + p);
  }

  Job& job_;
  const int64_t step_;
  const int64_t slice_count_;
  const size_t stride_;
  const int peers_;
  const int64_t depth_;  // segments
  char* const memory_;
  std::vector<Ticket> tickets_;
};

}  // namespace

void reduce_slices(Job& job, const Slices& slices,
                   const std::function<void(int64_t, int64_t)>& reduced) {
  Group& group = job.group;
  const int n = group.size();
  const int me = group.me();
  const size_t item = job.item();
  const int64_t mine = slices.counts[me];
  SegmentReceiver receiver(job, mine);

  Flight sends(group);
  const int64_t step = segment_count(job);
  for (int d = 1; d < n; ++d) {
    const int to = group.neighbor(d);
    const char* slice = slices.in + slices.begins[to] * static_cast<int64_t>(item);
    for (int64_t at = 0; at < slices.counts[to]; at += step) {
      const int64_t count = std::min(step, slices.counts[to] - at);
      if (job.prepare) job.prepare(slices.begins[to] + at, count);
      sends.add(group.send(to, slice + at * static_cast<int64_t>(item),
                           static_cast<size_t>(count) * item));
    }
  }

  std::vector<const void*> srcs(static_cast<size_t>(n));
  const char* own = slices.in + slices.begins[me] * static_cast<int64_t>(item);
  for (int64_t at = 0, segment = 0; at < mine; at += receiver.step(), ++segment) {
    const int64_t count = std::min(receiver.step(), mine - at);
    if (job.prepare) job.prepare(slices.begins[me] + at, count);
    receiver.wait(segment, srcs);
    srcs[me] = own + at * static_cast<int64_t>(item);
    job.reduce(slices.out + at * static_cast<int64_t>(item), srcs.data(), n, count, job.finish);
    receiver.release(segment);
    reduced(at, count);
  }
  sends.wait();
}

}  // namespace bagua
