#include "collective/pass.h"

#include <algorithm>

#include "collective/slices.h"

namespace bagua {

namespace {
constexpr int64_t kSegmentsAhead = kAheadNbytes / kSegmentNbytes;
}

void pass(Job& job, int to, Chunk out, int from, Chunk in, Landing landing, Finish finish) {
  Group& group = job.group;
  const auto item = static_cast<int64_t>(job.item());
  const int64_t step = segment_count(job);
  const bool reduces = landing == Landing::kReduce;
  const int64_t segments = (in.count + step - 1) / step;
  const int64_t ahead = reduces ? std::min(segments, kSegmentsAhead) : segments;
  char* landings =
      reduces ? job.scratch.get(Scratch::kReceive, static_cast<size_t>(ahead * step * item))
              : nullptr;
  const auto tell = [&](const std::function<void(int64_t, int64_t)>& whom, const Chunk& chunk,
                        int64_t at, int64_t count) {
    if (whom) whom((chunk.data - job.data) / item + at, count);
  };
  const auto place = [&](int64_t at) {
    return reduces ? landings + at / step % ahead * step * item : in.data + at * item;
  };
  std::vector<Ticket> posted(static_cast<size_t>(ahead));
  const auto post = [&](int64_t at) {
    const auto nbytes = static_cast<size_t>(std::min(step, in.count - at) * item);
    posted[static_cast<size_t>(at / step % ahead)] = group.recv(from, place(at), nbytes);
  };
  for (int64_t at = 0; at < std::min(in.count, ahead * step); at += step) post(at);
  Flight sends(group);
  for (int64_t at = 0; at < out.count; at += step) {
    const int64_t count = std::min(step, out.count - at);
    if (out.raw) tell(job.prepare, out, at, count);
    sends.add(group.send(to, out.data + at * item, static_cast<size_t>(count * item)));
  }
  for (int64_t at = 0; at < in.count; at += step) {
    const int64_t count = std::min(step, in.count - at);
    if (in.raw) tell(job.prepare, in, at, count);
    group.wait(posted[static_cast<size_t>(at / step % ahead)]);
    if (reduces) {
      char* mine = in.data + at * item;
      const void* srcs[] = {place(at), mine};
      job.reduce(mine, srcs, 2, count, finish);
    }
    if (in.final) tell(job.arrived, in, at, count);
    if (at + ahead * step < in.count) post(at + ahead * step);
  }
  sends.wait();
}

}  // namespace bagua
