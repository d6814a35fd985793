// Allreduce of floats through a codec, in two halves: rank i gets everyone's slice i encoded, adds
// up what it decodes in rank order, and sends the result, encoded again, to everyone. All decode
// the same bytes, the slice's owner too, so all ranks end with the same values. Steps: 2. Bytes
// sent per rank: 2 * (n-1)/n * N, in the codec's bytes.
#include <algorithm>
#include <vector>

#include "codec/codec.h"
#include "collective/floats.h"
#include "collective/slices.h"

namespace bagua {
namespace {

// Wire bytes that travel at a time, about.
constexpr int64_t kSegmentNbytes = 128 << 10;
// Values that are added up at a time, small enough for a core's cache; a multiple of every block.
constexpr int64_t kTile = 32 << 10;

struct Range {
  int64_t begin, count;
};

class Exchange {
 public:
  Exchange(Job& job, float* data)
      : job_(job), coding_(*job.coding), group_(job.group), data_(data), sends_(job.group) {
    const int n = group_.size();
    const int64_t block = coding_.block();
    segment_ = kTile * std::max<int64_t>(1, kSegmentNbytes / coding_.wire_nbytes(kTile));
    const int64_t blocks = (job.count + block - 1) / block;
    int64_t nbytes = 0;
    for (int i = 0; i < n; ++i) {
      const Slice slice = slice_of(blocks, n, i);
      const int64_t begin = std::min(slice.begin * block, job.count);
      slices_.push_back({begin, std::min((slice.begin + slice.count) * block, job.count) - begin});
      nbytes += coding_.wire_nbytes(slices_.back().count);
    }
    const int64_t mine = coding_.wire_nbytes(slice(group_.me()).count);
    char* memory = job.scratch.get(Scratch::kWire, static_cast<size_t>(2 * nbytes + n * mine));
    for (int i = 0; i < n; ++i) {
      const int64_t theirs = coding_.wire_nbytes(slice(i).count);
      parts_.push_back({memory, memory + theirs, memory + 2 * theirs});
      memory += 2 * theirs + mine;
    }
  }

  void run() {
    const int n = group_.size(), me = group_.me();
    std::vector<std::vector<Ticket>> parts(static_cast<size_t>(n)), results(parts);
    for (int d = 1; d < n; ++d) parts[group_.neighbor(-d)] = receive(group_.neighbor(-d), true);
    for (int d = 1; d < n; ++d) results[group_.neighbor(-d)] = receive(group_.neighbor(-d), false);
    for (int d = 1; d <= n; ++d) offer(group_.neighbor(d));
    for_segments(me, [&](size_t number, Range range, int64_t at) {
      for (int d = 1; d < n; ++d) group_.wait(parts[group_.neighbor(-d)][number]);
      reduce(range, at);
    });
    for (int d = 1; d < n; ++d) {
      const int from = group_.neighbor(-d);
      for_segments(from, [&](size_t number, Range range, int64_t at) {
        group_.wait(results[from][number]);
        take(range, parts_[static_cast<size_t>(from)].result + at);
      });
    }
    sends_.wait();
  }

 private:
  // Memory for what travels between this rank and another one, or stays here.
  struct Wires {
    char* given;   // my part of their slice
    char* result;  // their slice, when it is final
    char* taken;   // their part of my slice
  };

  const Range& slice(int i) const { return slices_[static_cast<size_t>(i)]; }

  // Calls f(number, elements, offset in the wire) for each segment of rank i's slice.
  template <class F>
  void for_segments(int i, F&& f) {
    int64_t at = 0;
    size_t number = 0;
    for (int64_t done = 0; done < slice(i).count; done += segment_, ++number) {
      const int64_t count = std::min(segment_, slice(i).count - done);
      f(number, Range{slice(i).begin + done, count}, at);
      at += coding_.wire_nbytes(count);
    }
  }

  // Their part of my slice, or their slice when it is final.
  std::vector<Ticket> receive(int from, bool part) {
    std::vector<Ticket> tickets;
    const Wires& wires = parts_[static_cast<size_t>(from)];
    for_segments(part ? group_.me() : from, [&](size_t, Range range, int64_t at) {
      tickets.push_back(group_.recv(from, (part ? wires.taken : wires.result) + at,
                                    static_cast<size_t>(coding_.wire_nbytes(range.count))));
    });
    return tickets;
  }

  void encode(Range range, float* residual, char* wire) {
    const float* values = data_ + range.begin;
    group_.touch(static_cast<size_t>(range.count * 4 + coding_.wire_nbytes(range.count)));
    if (residual) return coding_.encode_rest(values, residual + range.begin, range.count, wire);
    coding_.encode(values, range.count, wire);
  }

  // Encodes my part of rank i's slice and sends it.
  void offer(int i) {
    const bool mine = i == group_.me();
    const Wires& wires = parts_[static_cast<size_t>(i)];
    for_segments(i, [&](size_t, Range range, int64_t at) {
      if (job_.prepare) job_.prepare(range.begin, range.count);
      char* wire = (mine ? wires.taken : wires.given) + at;
      encode(range, job_.kept[0], wire);
      if (!mine)
        sends_.add(group_.send(i, wire, static_cast<size_t>(coding_.wire_nbytes(range.count))));
    });
  }

  // Everyone's part of my slice is here: adds up a segment of it and sends it.
  void reduce(Range range, int64_t at) {
    char* const result = parts_[static_cast<size_t>(group_.me())].result + at;
    char* wire = result;
    for (int64_t done = 0; done < range.count; done += kTile) {
      const Range tile{range.begin + done, std::min(kTile, range.count - done)};
      add_up(tile, at + (wire - result));
      encode(tile, job_.kept[1], wire);
      coding_.decode(wire, tile.count, data_ + tile.begin);
      wire += coding_.wire_nbytes(tile.count);
    }
    for (int d = 1; d < group_.size(); ++d)
      sends_.add(group_.send(group_.neighbor(d), result, static_cast<size_t>(wire - result)));
    if (job_.arrived) job_.arrived(range.begin, range.count);
  }

  void add_up(Range tile, int64_t at) {
    float* sum = data_ + tile.begin;
    std::fill_n(sum, tile.count, 0.0f);
    for (const Wires& wires : parts_) coding_.decode_add(wires.taken + at, tile.count, sum);
    const void* srcs[] = {sum};
    if (!job_.finish.identity())
      bagua::reduce(DType::kF32, ReduceOp::kSum, sum, srcs, 1, tile.count, job_.finish);
  }

  void take(Range range, const char* wire) {
    coding_.decode(wire, range.count, data_ + range.begin);
    if (job_.arrived) job_.arrived(range.begin, range.count);
  }

  Job& job_;
  const Coding& coding_;
  Group& group_;
  float* const data_;
  Flight sends_;
  int64_t segment_;
  std::vector<Range> slices_;  // of each rank
  std::vector<Wires> parts_;
};

}  // namespace

void compressed(Job& job) {
  on_floats(job, [](Job& job, float* data) { Exchange(job, data).run(); });
}

}  // namespace bagua
