#include "collective/pass.h"

#include <algorithm>

#include "collective/slices.h"

namespace bagua {

void pass(Job& job, int to, Piece out, int from, Piece in, Landing landing, Finish finish) {
  Group& group = job.group;
  const auto item = static_cast<int64_t>(job.item());
  const int64_t step = segment_count(job);
  const bool reduces = landing == Landing::kReduce;
  char* landings = reduces ? job.scratch.get(Scratch::kReceive, 2 * kSegmentNbytes) : nullptr;
  const auto tell = [&](const std::function<void(int64_t, int64_t)>& whom, const Piece& piece,
                        int64_t at, int64_t count) {
    if (whom) whom((piece.data - job.data) / item + at, count);
  };
  Flight sends(group);
  for (int64_t at = 0; at < out.count; at += step) {
    const int64_t count = std::min(step, out.count - at);
    if (out.raw) tell(job.prepare, out, at, count);
    sends.add(group.send(to, out.data + at * item, static_cast<size_t>(count * item)));
  }
  // Two segments are on their way to us at a time.
  const auto place = [&](int64_t at) {
    return reduces ? landings + at / step % 2 * step * item : in.data + at * item;
  };
  const auto post = [&](int64_t at) {
    return group.recv(from, place(at), static_cast<size_t>(std::min(step, in.count - at) * item));
  };
  Ticket posted[2] = {};
  for (int64_t at = 0; at < in.count && at < 2 * step; at += step) posted[at / step] = post(at);
  for (int64_t at = 0; at < in.count; at += step) {
    const int64_t count = std::min(step, in.count - at);
    if (in.raw) tell(job.prepare, in, at, count);
    group.wait(posted[at / step % 2]);
    if (reduces) {
      char* mine = in.data + at * item;
      const void* srcs[] = {place(at), mine};
      job.reduce(mine, srcs, 2, count, finish);
    }
    if (in.final) tell(job.arrived, in, at, count);
    if (at + 2 * step < in.count) posted[at / step % 2] = post(at + 2 * step);
  }
  sends.wait();
}

}  // namespace bagua
