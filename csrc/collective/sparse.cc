// Allreduce of floats through a codec that keeps few of them: everyone gets everyone's wire bytes
// and adds up in rank order what they say. Nothing is encoded twice, so nothing is lost of the sum.
// Steps: 1. Bytes sent per rank: (n-1) * N, in the codec's bytes. Where an exact allreduce of all
// values takes fewer, what the codec keeps goes that way.
#include <algorithm>
#include <vector>

#include "codec/codec.h"
#include "collective/floats.h"

namespace bagua {
namespace {

// Wire bytes that travel at a time, about.
constexpr int64_t kSegmentNbytes = 64 << 10;
// Values that are added up at a time, small enough for a core's cache.
constexpr int64_t kTile = 32 << 10;

// Values and their place in the wire.
struct Piece {
  int64_t begin, count;
  int64_t at, nbytes;
};

std::vector<Piece> pieces_of(const Coding& coding, int64_t count, int64_t step) {
  std::vector<Piece> pieces;
  int64_t at = 0;
  for (int64_t begin = 0; begin < count; begin += step) {
    const int64_t n = std::min(step, count - begin);
    pieces.push_back({begin, n, at, coding.wire_nbytes(n)});
    at += pieces.back().nbytes;
  }
  return pieces;
}

void encode(Job& job, float* data, const Piece& piece, char* wire) {
  if (job.prepare) job.prepare(piece.begin, piece.count);
  const float* values = data + piece.begin;
  job.group.touch(static_cast<size_t>(piece.count * 4 + piece.nbytes));
  if (!job.kept[0]) return job.coding->encode(values, piece.count, wire);
  job.coding->encode_rest(values, job.kept[0] + piece.begin, piece.count, wire);
}

// Adds up what everyone's wires, `stride` bytes apart, say of these values.
void add_up(const Job& job, const Piece& segment, const char* wires, int64_t stride, float* data) {
  for (const Piece& tile : pieces_of(*job.coding, segment.count, kTile)) {
    float* sum = data + segment.begin + tile.begin;
    std::fill_n(sum, tile.count, 0.0f);
    for (int i = 0; i < job.group.size(); ++i)
      job.coding->decode_add(wires + i * stride + segment.at + tile.at, tile.count, sum);
    const void* srcs[] = {sum};
    if (!job.finish.identity())
      reduce(DType::kF32, ReduceOp::kSum, sum, srcs, 1, tile.count, job.finish);
  }
  job.group.touch(static_cast<size_t>(segment.count * 4));
}

void gather(Job& job, float* data, const std::vector<Piece>& segments, int64_t nbytes) {
  Group& group = job.group;
  const int n = group.size();
  char* wires = job.scratch.get(Scratch::kWire, static_cast<size_t>(n * nbytes));
  std::vector<Ticket> arrivals;
  for (const Piece& segment : segments)
    for (int d = 1; d < n; ++d) {
      const int from = group.neighbor(-d);
      arrivals.push_back(group.recv(from, wires + from * nbytes + segment.at,
                                    static_cast<size_t>(segment.nbytes)));
    }
  Flight sends(group);
  for (const Piece& segment : segments) {
    char* mine = wires + group.me() * nbytes + segment.at;
    encode(job, data, segment, mine);
    for (int d = 1; d < n; ++d)
      sends.add(group.send(group.neighbor(d), mine, static_cast<size_t>(segment.nbytes)));
  }
  auto arrival = arrivals.begin();
  for (const Piece& segment : segments) {
    for (int d = 1; d < n; ++d) group.wait(*arrival++);
    add_up(job, segment, wires, nbytes, data);
    if (job.arrived) job.arrived(segment.begin, segment.count);
  }
  sends.wait();
}

void densely(Job& job, float* data, const std::vector<Piece>& segments, int64_t nbytes) {
  char* wire = job.scratch.get(Scratch::kWire, static_cast<size_t>(nbytes));
  for (const Piece& segment : segments) {
    encode(job, data, segment, wire);
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

void run(Job& job, float* data) {
  const int64_t block = job.coding->block();
  const int64_t blocks = std::max<int64_t>(1, kSegmentNbytes / job.coding->wire_nbytes(block));
  const std::vector<Piece> segments = pieces_of(*job.coding, job.count, blocks * block);
  const int64_t nbytes = segments.back().at + segments.back().nbytes;
  const bool dense = job.group.size() * nbytes > 2 * 4 * job.count;
  (dense ? densely : gather)(job, data, segments, nbytes);
}

}  // namespace

void sparse(Job& job) { on_floats(job, run); }

}  // namespace bagua
