// Allreduce over nodes of several ranks each, which may differ in number: the ranks of a node
// reduce into its leaders' slices over shared memory, leader i of every node allreduces slice i
// with its counterparts by messages, and writes what comes back to everyone on its node. Bytes sent
// per node: 2 * (k-1)/k * N for k nodes, as if each were one rank. How the leaders do it is chosen
// as for any allreduce, through the job's codec and with its peers if it has any; then a node is
// one peer, which counts by its ranks. Pipelined rows overlap with the work inside the node,
// segment by segment.
//
// Sums of 16-bit floats are formed as fp32. They travel in 16 bits, through a codec: a node's sum
// is rounded once and everyone's once. As fp32 travel those by a row that the user has named, and
// float16 that is to be scaled, of which too little or too much may be left before.
#include <algorithm>
#include <vector>

#include "collective/collective.h"
#include "collective/node_layout.h"
#include "common/scaled.h"

namespace bagua {
namespace {

// At a time; memory that others cannot see is copied through as much of shared memory.
constexpr size_t kChunkNbytes = scaled(32 << 20);

// The ranks of one node and a chunk of everyone's data, in memory that all of them see.
class NodeChunk {
 public:
  NodeChunk(Job& job, Group& group, char* data, int64_t count)
      : job_(job), group_(group), data_(data), count_(count), bases_(1, data) {
    const size_t nbytes = static_cast<size_t>(count) * job.item();
    if (group.size() == 1) return;
    group.settle();
    Place place = group.node()->arenas()->find(data, nbytes);
    if (place.nowhere()) {
      copy_ = job.scratch.get(Scratch::kShare, nbytes);
      copy(group, copy_, data, nbytes);
      place = group.node()->arenas()->find(copy_, nbytes);
    }
    const auto notes = group.step({place, 0});
    bases_.clear();
    for (int i = 0; i < group.size(); ++i)
      bases_.push_back(i == group.me() ? mine() : group.at(i, notes[static_cast<size_t>(i)].place));
  }

  char* mine() const { return copy_ ? copy_ : data_; }

  // Elements from `begin` on: reduced over the node, into my own memory.
  void reduce_here(int64_t begin, int64_t count) const {
    if (bases_.size() == 1) return;
    const auto at = begin * static_cast<int64_t>(job_.item());
    std::vector<const void*> srcs;
    for (const char* base : bases_) srcs.push_back(base + at);
    job_.reduce(mine() + at, srcs.data(), static_cast<int>(srcs.size()), count, {}, &group_);
  }
  // The same for 16-bit floats, without rounding, and times `share`.
  void reduce_wide(int64_t begin, int64_t count, float* to, double share) const {
    std::vector<const void*> srcs;
    for (const char* base : bases_)
      srcs.push_back(base + begin * static_cast<int64_t>(job_.item()));
    job_.reduce_wide(to, srcs.data(), static_cast<int>(srcs.size()), count, share);
  }

  // The same elements out of my memory into everyone else's.
  void share(int64_t begin, int64_t count) const {
    const auto at = begin * static_cast<int64_t>(job_.item());
    for (char* base : bases_)
      if (base != mine())
        copy(group_, base + at, mine() + at, static_cast<size_t>(count) * job_.item());
  }

  void part() {
    if (group_.size() == 1) return;
    group_.step();
    if (copy_) copy(group_, data_, copy_, static_cast<size_t>(count_) * job_.item());
  }

 private:
  Job& job_;
  Group& group_;
  char* const data_;
  const int64_t count_;
  char* copy_ = nullptr;
  std::vector<char*> bases_;  // of every rank of the node
};

// Whether what leaders exchange of 16-bit floats may travel in 16 bits.
bool may_travel_halved(const Job& job, const Job& across) {
  return is_linear(job.op) && !job.coding && job.peers.all() && job.between_nodes == "auto" &&
         across.group.size() > 1 && (job.dtype != DType::kF16 || job.finish.factor == 1);
}

// What part of a node's sum travels: all of it may be too large for a float16 where the average
// over all nodes, of at most so many ranks, is not.
double share_of(const Job& job, int most) {
  double share = 1;
  while (job.dtype == DType::kF16 && job.finish.divisor != 1 && most * share > 1) share /= 2;
  return share;
}

// The leaders' part: slice number `leader` of the chunk at `at`, over all nodes.
void lead(Job& job, Group& far, int leader, const NodeLayout& layout, int64_t at, int64_t count,
          const NodeChunk& chunk) {
  const Slice slice = slice_of(count, layout.leaders, leader);
  if (slice.count == 0) return;
  const bool wide = dtype_nbytes(job.dtype) == 2 && is_float(job.dtype) && !picks(job.op);
  char* mine = chunk.mine() + slice.begin * static_cast<int64_t>(job.item());
  Job across{far, job.scratch, wide ? DType::kF32 : job.dtype, job.op, job.finish};
  across.count = slice.count;
  across.coding = far.size() > 1 ? job.coding : nullptr;
  for (size_t i = 0; i < job.kept.size(); ++i)
    if (job.kept[i]) across.kept[i] = job.kept[i] + at + slice.begin;
  across.peers = job.peers;
  across.weights = layout.weights;
  across.in_company = job.in_company;
  const bool halved = wide && may_travel_halved(job, across);
  const Coding halves = half_coding(job.dtype);
  const double share = halved ? share_of(job, layout.most) : 1;
  if (halved) across.coding = &halves;
  across.finish.factor /= share;
  across.data = wide ? job.scratch.get(Scratch::kWide, across.nbytes()) : mine;
  auto* floats = reinterpret_cast<float*>(across.data);
  across.prepare = [&](int64_t begin, int64_t n) {
    if (wide) return chunk.reduce_wide(slice.begin + begin, n, floats + begin, share);
    chunk.reduce_here(slice.begin + begin, n);
  };
  across.arrived = [&](int64_t begin, int64_t n) {
    if (wide) job.narrow(mine + begin * static_cast<int64_t>(job.item()), floats + begin, n);
    chunk.share(slice.begin + begin, n);
  };
  const Collective& row = choose_collective(OpKind::kAllreduce, across, job.between_nodes);
  if (job.chosen && far.size() > 1) job.chosen(row, across);
  if (!row.pipelined) across.prepare(0, slice.count);
  row.run(across);
  if (!row.pipelined) across.arrived(0, slice.count);
}

}  // namespace

void hierarchical(Job& job) {
  const NodeLayout layout = node_layout_of(job.group);
  Group near = job.group.part(layout.mine);
  Group far = job.group.part(layout.leads() ? layout.partners : std::vector<int>{job.group.me()});
  const int64_t step = static_cast<int64_t>(kChunkNbytes / job.item());
  for (int64_t at = 0; at < job.count; at += step) {
    const int64_t count = std::min(step, job.count - at);
    NodeChunk chunk(job, near, job.data + at * static_cast<int64_t>(job.item()), count);
    if (layout.leads()) lead(job, far, near.me(), layout, at, count, chunk);
    chunk.part();
  }
  job.group.count(near);
  job.group.count(far);
}

}  // namespace bagua
