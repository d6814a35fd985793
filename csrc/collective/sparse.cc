// Allreduce of floats through a codec that keeps few of them: everyone gets everyone's wire bytes
// and adds up in rank order what they say. Nothing is encoded twice, so nothing is lost of the sum.
// Steps: 1. Bytes sent per rank: (n-1) * N, in the codec's bytes. Where an exact allreduce of all
// values takes fewer, what the codec keeps goes that way.
#include "codec/codec.h"
#include "collective/coded.h"
#include "kernel/stream.h"

namespace bagua {
namespace {

void gather(Job& job, float* data, const std::vector<Stretch>& segments, int64_t nbytes) {
  Group& group = job.group;
  const int n = group.size();
  char* wires = job.scratch.get(Scratch::kWire, static_cast<size_t>(n * nbytes));
  std::vector<Ticket> arrivals;
  for (const Stretch& segment : segments)
    for (int d = 1; d < n; ++d) {
      const int from = group.neighbor(-d);
      arrivals.push_back(group.recv(from, wires + from * nbytes + segment.at,
                                    static_cast<size_t>(segment.nbytes)));
    }
  Flight sends(group);
  for (const Stretch& segment : segments) {
    if (job.prepare) job.prepare(segment.begin, segment.count);
    char* mine = wires + group.me() * nbytes + segment.at;
    {
      const CodecTime time(group);
      encode(job, data, job.kept[0], segment, mine);
    }
    for (int d = 1; d < n; ++d)
      sends.add(group.send(group.neighbor(d), mine, static_cast<size_t>(segment.nbytes)));
  }
  // Of a large result a tile is added up in the caches, and copied past them.
  const bool past = job.leaves && job.nbytes() >= kStreamNbytes;
  char* const memory = past ? job.scratch.get(Scratch::kWide, kTile * sizeof(float)) : nullptr;
  auto* const sum = reinterpret_cast<float*>(memory);
  auto arrival = arrivals.begin();
  for (const Stretch& segment : segments) {
    for (int d = 1; d < n; ++d) group.wait(*arrival++);
    for (const Stretch& tile : stretches(*job.coding, segment.begin, segment.count, kTile)) {
      const CodecTime time(group);
      std::vector<const char*> said;
      for (int i = 0; i < n; ++i) said.push_back(wires + i * nbytes + segment.at + tile.at);
      float* const out = data + tile.begin;
      job.coding->add_up(said, job.finish, tile.count, past ? sum : out);
      if (past) stream_copy(out, sum, static_cast<size_t>(tile.count) * sizeof(float));
    }
    if (past) stream_fence();
    group.touch(static_cast<size_t>(segment.count * 4));
    if (job.arrived) job.arrived(segment.begin, segment.count);
  }
  sends.wait();
}

void densely(Job& job, float* data, const std::vector<Stretch>& segments, int64_t nbytes) {
  char* wire = job.scratch.get(Scratch::kWire, static_cast<size_t>(nbytes));
  for (const Stretch& segment : segments) {
    if (job.prepare) job.prepare(segment.begin, segment.count);
    const CodecTime time(job.group);
    encode(job, data, job.kept[0], segment, wire);
    job.coding->decode(wire, segment.count, data + segment.begin);
  }
  Job exact{job.group, job.scratch, DType::kF32, job.op, job.finish};
  exact.data = reinterpret_cast<char*>(data);
  exact.count = job.count;
  exact.arrived = job.arrived;
  const Collective& row = choose_collective(OpKind::kAllreduce, exact, "auto");
  row.run(exact);
  if (job.arrived && !row.pipelined) job.arrived(0, job.count);
}

}  // namespace

void sparse(Job& job) {
  on_floats(job, [](Job& job, float* data) {
    const std::vector<Stretch> segments = stretches(*job.coding, 0, job.count);
    const int64_t nbytes = segments.back().at + segments.back().nbytes;
    const bool dense = job.group.size() * nbytes > 2 * 4 * job.count;
    (dense ? densely : gather)(job, data, segments, nbytes);
  });
}

}  // namespace bagua
