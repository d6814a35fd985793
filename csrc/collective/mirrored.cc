// What ranks on a ring tell each other of their values is how far these have moved, through a
// codec: each keeps a copy of what its neighbors know of it, and of what it knows of them. Values x
// and copies w of this rank, l and r of its neighbors become
//   z = x + l/3 + r/3 - 5/3 w;  w += Q(z);  l += Q(z of the left);  r += Q(z of the right);  x = w
// so that l always is the left neighbor's w, bit by bit, if both began alike. Of two ranks either
// is both neighbors of the other. This rank's own values are final before anything has arrived.
// Steps: 1. Bytes sent per rank: N for each neighbor, in the
// codec's bytes.
#include <algorithm>
#include <vector>

#include "collective/collective.h"

namespace bagua {
namespace {

// What travels at a time, unless that were too many messages, and what is computed at a time:
// multiples of every codec's block.
constexpr int64_t kSegment = 128 << 10;
constexpr int64_t kMostSegments = 256;
constexpr int64_t kTile = 4096;

// How far this rank has moved, all ranks' copies considered.
void difference(const float* x, const Job& job, int64_t at, int64_t n, float* z) {
  const float *w = job.kept[0] + at, *l = job.kept[1] + at, *r = job.kept[2] + at;
  const float share = 1.0f / static_cast<float>(job.weight_of(job.group.me()));
  for (int64_t i = 0; i < n; ++i)
    z[i] = x[i] * share + l[i] / 3.0f + r[i] / 3.0f - (5.0f / 3.0f) * w[i];
}

}  // namespace

void mirrored(Job& job) {
  Group& group = job.group;
  const Coding& coding = *job.coding;
  auto* x = reinterpret_cast<float*>(job.data);
  const int left = group.neighbor(-1), right = group.neighbor(1);
  // A rank that has joined tells that it did not move, and keeps no copies.
  const bool rests = job.kept[0] == nullptr;
  const int64_t wire_nbytes = coding.wire_nbytes(job.count);
  char* mine = job.scratch.get(Scratch::kWire, static_cast<size_t>(3 * wire_nbytes));
  char* from_left = mine + wire_nbytes;
  char* from_right = left == right ? from_left : from_left + wire_nbytes;

  const int64_t step = std::max(kSegment, (job.count / kMostSegments + kTile) / kTile * kTile);
  const auto for_segments = [&](const auto& f) {
    int64_t wire = 0;
    for (int64_t at = 0; at < job.count; at += step) {
      const int64_t n = std::min(step, job.count - at);
      const int64_t nbytes = coding.wire_nbytes(n);
      f(at, n, wire, static_cast<size_t>(nbytes));
      wire += nbytes;
    }
  };
  std::vector<Ticket> coming;
  for_segments([&](int64_t, int64_t, int64_t wire, size_t nbytes) {
    coming.push_back(group.recv(left, from_left + wire, nbytes));
    if (left != right) coming.push_back(group.recv(right, from_right + wire, nbytes));
  });
  Flight going(group);
  for_segments([&](int64_t begin, int64_t count, int64_t wire, size_t nbytes) {
    if (job.prepare) job.prepare(begin, count);
    char* to = mine + wire;
    for (int64_t at = begin; at < begin + count; at += kTile) {
      const int64_t n = std::min(kTile, begin + count - at);
      float z[kTile] = {};
      if (!rests) difference(x + at, job, at, n, z);
      coding.encode(z, n, to);
      if (!rests) {
        coding.decode_add(to, n, job.kept[0] + at);
        std::copy_n(job.kept[0] + at, n, x + at);
      }
      to += coding.wire_nbytes(n);
    }
    group.touch(nbytes + static_cast<size_t>(count) * 4 * sizeof(float));
    going.add(group.send(left, mine + wire, nbytes));
    if (left != right) going.add(group.send(right, mine + wire, nbytes));
    if (job.arrived) job.arrived(begin, count);
  });
  if (job.values_final) job.values_final();
  auto ticket = coming.begin();
  for_segments([&](int64_t at, int64_t n, int64_t wire, size_t) {
    group.wait(*ticket++);
    if (left != right) group.wait(*ticket++);
    if (!rests) {
      coding.decode_add(from_left + wire, n, job.kept[1] + at);
      coding.decode_add(from_right + wire, n, job.kept[2] + at);
    }
  });
  going.wait();
}

}  // namespace bagua
