// Allreduce of floats through a codec, in two halves: rank i gets everyone's slice i encoded, adds
// up what it decodes in rank order, and sends the result, encoded again, to everyone. All decode
// the same bytes, the slice's owner too, so all ranks end with the same values. Of several jobs all
// parts leave before the first result is due. Steps: 2. Bytes sent per rank: 2 * (n-1)/n * N, in
// the codec's bytes.
#include <algorithm>
#include <vector>

#include "codec/codec.h"
#include "collective/coded.h"
#include "collective/slices.h"
#include "kernel/stream.h"

namespace bagua {
namespace {

class Compressed {
 public:
  explicit Compressed(const Floats& floats)
      : job_(floats.job),
        coding_(*job_.coding),
        group_(job_.group),
        data_(floats.data),
        sends_(job_.group) {
    const int n = group_.size();
    const int64_t block = coding_.block();
    const int64_t blocks = (job_.count + block - 1) / block;
    for (int i = 0; i < n; ++i) {
      const Slice slice = slice_of(blocks, n, i);
      const int64_t begin = std::min(slice.begin * block, job_.count);
      const int64_t end = std::min((slice.begin + slice.count) * block, job_.count);
      segments_.push_back(stretches(coding_, begin, end - begin));
      nbytes_.push_back(coding_.wire_nbytes(end - begin));
    }
  }

  size_t scratch_nbytes() const {
    int64_t sum = 0;
    for (const int64_t theirs : nbytes_) sum += 2 * theirs + mine_nbytes();
    return static_cast<size_t>(sum);
  }
  void use(char* memory) {
    for (const int64_t theirs : nbytes_) {
      wires_.push_back({memory, memory + theirs, memory + 2 * theirs, {}, {}});
      memory += 2 * theirs + mine_nbytes();
    }
  }

  void expect_parts() {
    for (int d = 1; d < group_.size(); ++d) {
      const int from = group_.neighbor(-d);
      wires_[from].parts = receive(from, segments_[group_.me()], wires_[from].taken);
    }
  }

  void expect_results() {
    for (int d = 1; d < group_.size(); ++d) {
      const int from = group_.neighbor(-d);
      wires_[from].results = receive(from, segments_[from], wires_[from].result);
    }
  }

  // By turns, so that every slice's first segments are complete early: where a rank comes late,
  // results of all slices flow while it still sends.
  void offer_all() {
    size_t most = 0;  // a shorter slice may be cut into more
    for (const auto& segments : segments_) most = std::max(most, segments.size());
    for (size_t number = 0; number < most; ++number)
      for (int d = 1; d <= group_.size(); ++d) offer(group_.neighbor(d), number);
  }

  bool reduce_all(bool waits) {
    const auto& mine = segments_[group_.me()];
    for (; reduced_ < mine.size(); ++reduced_) {
      for (int d = 1; d < group_.size(); ++d)
        if (!group_.here(wires_[group_.neighbor(-d)].parts[reduced_], waits)) return false;
      reduce(mine[reduced_]);
    }
    return true;
  }

  bool take_all(bool waits) {
    for (; taken_from_ < group_.size(); ++taken_from_, taken_ = 0) {
      const int from = group_.neighbor(-taken_from_);
      Wires& wires = wires_[from];
      for (; taken_ < wires.results.size(); ++taken_) {
        if (!group_.here(wires.results[taken_], waits)) return false;
        const Stretch& segment = segments_[from][taken_];
        take(segment, wires.result + segment.at);
      }
    }
    return true;
  }

  bool part(bool waits) { return sends_.landed(waits); }

 private:
  // What travels between this rank and another one, or stays here.
  struct Wires {
    char* given;                         // my part of their slice
    char* result;                        // their slice, when it is final
    char* taken;                         // their part of my slice
    std::vector<Ticket> parts, results;  // of what is taken, by segment
  };

  int64_t mine_nbytes() const { return nbytes_[static_cast<size_t>(group_.me())]; }

  std::vector<Ticket> receive(int from, const std::vector<Stretch>& segments, char* wire) {
    std::vector<Ticket> tickets;
    for (const Stretch& segment : segments)
      tickets.push_back(group_.recv(from, wire + segment.at, static_cast<size_t>(segment.nbytes)));
    return tickets;
  }

  // Encodes a segment of my part of rank i's slice, and sends it.
  void offer(int i, size_t number) {
    if (number >= segments_[i].size()) return;
    const bool mine = i == group_.me();
    const Stretch& segment = segments_[i][number];
    if (job_.prepare) job_.prepare(segment.begin, segment.count);
    const CodecTime time(group_);
    char* wire = (mine ? wires_[i].taken : wires_[i].given) + segment.at;
    encode(job_, data_, job_.kept[0], segment, wire);
    if (!mine) sends_.add(group_.send(i, wire, static_cast<size_t>(segment.nbytes)));
  }

  // Everyone's part of my slice is here: adds up a segment of it and sends it.
  void reduce(const Stretch& segment) {
    char* const result = wires_[group_.me()].result + segment.at;
    for (const Stretch& tile : stretches(coding_, segment.begin, segment.count, kTile)) {
      const CodecTime time(group_);
      std::vector<const char*> said;
      for (const Wires& wires : wires_) said.push_back(wires.taken + segment.at + tile.at);
      add_up(job_, said, tile.count, data_ + tile.begin);
      encode(job_, data_, job_.kept[1], tile, result + tile.at);
      coding_.decode(result + tile.at, tile.count, data_ + tile.begin);
    }
    for (int d = 1; d < group_.size(); ++d)
      sends_.add(group_.send(group_.neighbor(d), result, static_cast<size_t>(segment.nbytes)));
    if (job_.arrived) job_.arrived(segment.begin, segment.count);
  }

  void take(const Stretch& segment, const char* wire) {
    const bool past = job_.leaves && job_.nbytes() >= kStreamNbytes;
    const auto decode = past ? &Coding::decode_past : &Coding::decode;
    {
      const CodecTime time(group_);
      (coding_.*decode)(wire, segment.count, data_ + segment.begin, best_isa());
    }
    group_.touch(static_cast<size_t>(segment.nbytes + segment.count * 4));
    if (job_.arrived) job_.arrived(segment.begin, segment.count);
  }

  Job& job_;
  const Coding& coding_;
  Group& group_;
  float* const data_;
  Flight sends_;
  std::vector<std::vector<Stretch>> segments_;  // of each rank's slice
  std::vector<int64_t> nbytes_;                 // the same, encoded
  std::vector<Wires> wires_;                    // by rank
  size_t reduced_ = 0;                          // segments of my slice
  int taken_from_ = 1;                          // at what distance, up to
  size_t taken_ = 0;                            // which segment
};

class AllCompressed : public AllUnderWay<Compressed> {
 public:
  explicit AllCompressed(const Jobs& jobs)
      : AllUnderWay({&Compressed::reduce_all, &Compressed::take_all, &Compressed::part}),
        floats_(jobs) {
    for (const Floats& floats : floats_.all()) each.emplace_back(floats);
    share_out(jobs[0]->scratch, Scratch::kWire, each);
    // What is expected of a rank is in the order in which it sends.
    for (Compressed& one : each) one.expect_parts();
    for (Compressed& one : each) one.expect_results();
    for (Compressed& one : each) one.offer_all();
  }
  void finish() override {
    AllUnderWay::finish();
    floats_.give_back();
  }

 private:
  const AsFloats floats_;
};

}  // namespace

std::unique_ptr<UnderWay> compressed(const Jobs& jobs) {
  return std::make_unique<AllCompressed>(jobs);
}

}  // namespace bagua
