// Allreduce of floats through a codec that keeps few of them: everyone gets everyone's wire bytes
// and adds up in rank order what they say. Nothing is encoded twice, so nothing is lost of the sum.
// Of several jobs everything that goes like that leaves before the first sum. Steps: 1. Bytes sent
// per rank: (n-1) * N, in the codec's bytes. Where an exact allreduce of all values takes fewer,
// what the codec keeps goes that way.
#include "codec/codec.h"
#include "collective/coded.h"
#include "kernel/stream.h"

namespace bagua {
namespace {

class Gather {
 public:
  Gather(const Floats& floats, std::vector<Stretch> segments)
      : job_(floats.job),
        group_(job_.group),
        data_(floats.data),
        segments_(std::move(segments)),
        nbytes_(segments_.back().at + segments_.back().nbytes),
        sends_(job_.group) {}

  size_t scratch_nbytes() const { return static_cast<size_t>(group_.size() * nbytes_); }
  void use(char* memory) { wires_ = memory; }
  void use_for_tiles(float* memory) { tile_sum_ = memory; }

  void expect_all() {
    for (const Stretch& segment : segments_)
      for (int d = 1; d < group_.size(); ++d) {
        const int from = group_.neighbor(-d);
        arrivals_.push_back(
            group_.recv(from, wire(from, segment), static_cast<size_t>(segment.nbytes)));
      }
  }

  void offer_all() {
    for (const Stretch& segment : segments_) {
      if (job_.prepare) job_.prepare(segment.begin, segment.count);
      char* mine = wire(group_.me(), segment);
      {
        const CodecTime time(group_);
        encode(job_, data_, job_.kept[0], segment, mine);
      }
      for (int d = 1; d < group_.size(); ++d)
        sends_.add(group_.send(group_.neighbor(d), mine, static_cast<size_t>(segment.nbytes)));
    }
  }

  // Of a large result a tile is added up in the caches, and copied past them.
  bool add_up_all(bool waits) {
    const bool past = job_.leaves && job_.nbytes() >= kStreamNbytes;
    const auto others = static_cast<size_t>(group_.size() - 1);
    for (; added_up_ < segments_.size(); ++added_up_) {
      for (size_t i = 0; i < others; ++i)
        if (!group_.here(arrivals_[added_up_ * others + i], waits)) return false;
      const Stretch& segment = segments_[added_up_];
      for (const Stretch& tile : stretches(*job_.coding, segment.begin, segment.count, kTile)) {
        const CodecTime time(group_);
        std::vector<const char*> said;
        for (int i = 0; i < group_.size(); ++i) said.push_back(wire(i, segment) + tile.at);
        float* const out = data_ + tile.begin;
        add_up(job_, said, tile.count, past ? tile_sum_ : out);
        if (past) stream_copy(out, tile_sum_, static_cast<size_t>(tile.count) * sizeof(float));
      }
      if (past) stream_fence();
      group_.touch(static_cast<size_t>(segment.count * 4));
      if (job_.arrived) job_.arrived(segment.begin, segment.count);
    }
    return true;
  }

  bool part(bool waits) { return sends_.landed(waits); }

 private:
  char* wire(int rank, const Stretch& segment) const {
    return wires_ + rank * nbytes_ + segment.at;
  }

  Job& job_;
  Group& group_;
  float* const data_;
  const std::vector<Stretch> segments_;
  const int64_t nbytes_;  // of one rank's wire
  char* wires_ = nullptr;
  float* tile_sum_ = nullptr;
  std::vector<Ticket> arrivals_;  // by segment, then by rank
  size_t added_up_ = 0;           // segments
  Flight sends_;
};

void densely(const Floats& floats, const std::vector<Stretch>& segments, int64_t nbytes) {
  auto& [job, data] = floats;
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
  exact.crew = job.crew;
  exact.chosen = job.chosen;
  exact.in_company = job.in_company;
  exact.weights = job.weights;
  exact.between_nodes = job.between_nodes;
  const Collective& row = choose_collective(OpKind::kAllreduce, exact, job.between_nodes);
  if (job.chosen) job.chosen(row, exact);
  row.run(exact);
  if (job.arrived && !row.pipelined) job.arrived(0, job.count);
}

class Sparse : public AllUnderWay<Gather> {
 public:
  explicit Sparse(const Jobs& jobs)
      : AllUnderWay({&Gather::add_up_all, &Gather::part}), floats_(jobs) {
    for (const Floats& floats : floats_.all()) {
      const Job& job = floats.job;
      std::vector<Stretch> segments = stretches(*job.coding, 0, job.count);
      const int64_t wire = segments.back().at + segments.back().nbytes;
      if (goes_densely(job.group.size(), wire, job.count)) {
        dense_.push_back({floats, std::move(segments), wire});
      } else {
        each.emplace_back(floats, std::move(segments));
      }
    }
    auto* const tile = reinterpret_cast<float*>(
        share_out(jobs[0]->scratch, Scratch::kWire, each, kTile * sizeof(float)));
    for (Gather& one : each) one.use_for_tiles(tile);
    for (Gather& one : each) one.expect_all();
    for (Gather& one : each) one.offer_all();
  }
  void finish() override {
    AllUnderWay::finish();
    for (const Dense& one : dense_) densely(one.floats, one.segments, one.nbytes);
    floats_.give_back();
  }

 private:
  struct Dense {
    Floats floats;
    std::vector<Stretch> segments;
    int64_t nbytes;  // of the wire
  };

  const AsFloats floats_;
  std::vector<Dense> dense_;
};

}  // namespace

std::unique_ptr<UnderWay> sparse(const Jobs& jobs) { return std::make_unique<Sparse>(jobs); }

}  // namespace bagua
