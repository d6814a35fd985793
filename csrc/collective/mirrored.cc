// What ranks on a ring tell each other of their values is how far these have moved, through a
// codec: each keeps a copy of what its neighbors know of it, and of what it knows of them. Values x
// and copies w of this rank, l and r of its neighbors become
//   z = x + l/3 + r/3 - 5/3 w;  w += Q(z);  l += Q(z of the left);  r += Q(z of the right);  x = w
// so that l always is the left neighbor's w, bit by bit, if both began alike. Of two ranks either
// is both neighbors of the other. Where ranks stand for more than themselves, a neighbor that
// stands for fewer counts by so much less, and the mean over all stays what it is. This rank's own
// values are final before anything has arrived. Steps: 1. Bytes sent per rank: N for each neighbor,
// in the codec's bytes.
#include <algorithm>
#include <vector>

#include "collective/coded.h"

namespace bagua {
namespace {

// Values that are computed at a time; a multiple of every block.
constexpr int64_t kPart = 4096;

// How far this rank has moved, all ranks' copies considered.
void difference(const float* x, const Job& job, int64_t at, int64_t n, float* z) {
  const float *w = job.kept[0] + at, *l = job.kept[1] + at, *r = job.kept[2] + at;
  const double mine = job.weight_of(job.group.me());
  const auto counts = [&](int d) {
    return std::min(1.0, job.weight_of(job.group.neighbor(d)) / mine);
  };
  const auto share = static_cast<float>(1 / mine);
  const auto left = static_cast<float>(counts(-1)), right = static_cast<float>(counts(1));
  const auto own = static_cast<float>((3 + counts(-1) + counts(1)) / 3);
  for (int64_t i = 0; i < n; ++i)
    z[i] = x[i] * share + left * l[i] / 3.0f + right * r[i] / 3.0f - own * w[i];
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

  const std::vector<Stretch> segments = stretches(coding, 0, job.count);
  std::vector<Ticket> coming;
  for (const Stretch& segment : segments) {
    const auto nbytes = static_cast<size_t>(segment.nbytes);
    coming.push_back(group.recv(left, from_left + segment.at, nbytes));
    if (left != right) coming.push_back(group.recv(right, from_right + segment.at, nbytes));
  }
  Flight going(group);
  for (const Stretch& segment : segments) {
    if (job.prepare) job.prepare(segment.begin, segment.count);
    char* wire = mine + segment.at;
    for (const Stretch& part : stretches(coding, segment.begin, segment.count, kPart)) {
      const CodecTime time(group);
      float z[kPart] = {};
      if (!rests) difference(x + part.begin, job, part.begin, part.count, z);
      coding.encode(z, part.count, wire + part.at);
      if (rests) continue;
      coding.decode_add(wire + part.at, part.count, job.kept[0] + part.begin);
      std::copy_n(job.kept[0] + part.begin, part.count, x + part.begin);
    }
    const auto nbytes = static_cast<size_t>(segment.nbytes);
    group.touch(nbytes + static_cast<size_t>(segment.count) * 4 * sizeof(float));
    going.add(group.send(left, wire, nbytes));
    if (left != right) going.add(group.send(right, wire, nbytes));
    if (job.arrived) job.arrived(segment.begin, segment.count);
  }
  if (job.values_final) job.values_final();
  auto ticket = coming.begin();
  for (const Stretch& segment : segments) {
    group.wait(*ticket++);
    if (left != right) group.wait(*ticket++);
    if (rests) continue;
    const CodecTime time(group);
    coding.decode_add(from_left + segment.at, segment.count, job.kept[1] + segment.begin);
    coding.decode_add(from_right + segment.at, segment.count, job.kept[2] + segment.begin);
  }
  going.wait();
}

}  // namespace bagua
