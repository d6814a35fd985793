// What ranks on a ring tell each other of their values is how far these have moved, through a
// codec: each keeps a copy of what its neighbors know of it, and of what it knows of them. Values x
// and copies w of this rank, l and r of its neighbors become
//   z = x + 1/3 l + 1/3 r - 5/3 w;
//   w += Q(z);  l += Q(z of the left);  r += Q(z of the right);  x = w
// so that l always is the left neighbor's w, bit by bit, if both began alike. Of two ranks either
// is both neighbors of the other. Where ranks stand for more than themselves, a neighbor that
// stands for fewer counts by so much less, and the mean over all stays what it is. This rank's own
// values are final before anything has arrived, also of several jobs. Steps: 1. Bytes sent per
// rank: N for each neighbor, in the codec's bytes.
#include "collective/mirrored.h"

#include <algorithm>
#include <vector>

#include "collective/coded.h"
#include "kernel/isa.h"

namespace bagua {
namespace {

// Values that are computed at a time; a multiple of every block.
constexpr int64_t kPart = 4096;

#define BAGUA_MOVED(isa, attribute)                                                               \
  attribute void moved_##isa(const Shares& of, const float* __restrict x,                         \
                             const float* __restrict l, const float* __restrict r,                \
                             const float* __restrict w, int64_t n, float* __restrict z) {         \
    for (int64_t i = 0; i < n; ++i) z[i] = of.x * x[i] + of.l * l[i] + of.r * r[i] - of.w * w[i]; \
  }
BAGUA_CLONES(BAGUA_MOVED)
#define BAGUA_ENTRY(isa, attribute) moved_##isa,
constexpr decltype(&moved_kBaseline) moves[kIsaCount] = {BAGUA_CLONES(BAGUA_ENTRY)};
#undef BAGUA_ENTRY
#undef BAGUA_MOVED

class Mirrored {
 public:
  explicit Mirrored(Job& job)
      : job_(job),
        group_(job.group),
        coding_(*job.coding),
        left_(group_.neighbor(-1)),
        right_(group_.neighbor(1)),
        shares_(shares_of(job, left_, group_.me(), right_)),
        segments_(stretches(coding_, 0, job.count)),
        sends_(group_) {}

  size_t scratch_nbytes() const { return static_cast<size_t>(3 * wire_nbytes()); }
  void use(char* memory) {
    mine_ = memory;
    from_left_ = mine_ + wire_nbytes();
    from_right_ = left_ == right_ ? from_left_ : from_left_ + wire_nbytes();
  }

  void expect() {
    for (const Stretch& segment : segments_) {
      const auto n = static_cast<size_t>(segment.nbytes);
      coming_.push_back(group_.recv(left_, from_left_ + segment.at, n));
      if (left_ != right_) coming_.push_back(group_.recv(right_, from_right_ + segment.at, n));
    }
  }

  void move_all() {
    const auto move = moves[static_cast<int>(best_isa())];
    auto* x = reinterpret_cast<float*>(job_.data);
    for (const Stretch& segment : segments_) {
      if (job_.prepare) job_.prepare(segment.begin, segment.count);
      char* wire = mine_ + segment.at;
      for (const Stretch& part : stretches(coding_, segment.begin, segment.count, kPart)) {
        const CodecTime time(group_);
        float z[kPart];
        if (rests())
          std::fill_n(z, part.count, 0.0f);
        else
          move(shares_, x + part.begin, kept(1, part), kept(2, part), kept(0, part), part.count, z);
        coding_.encode(z, part.count, wire + part.at);
        if (rests()) continue;
        coding_.decode_add(wire + part.at, part.count, kept(0, part));
        std::copy_n(kept(0, part), part.count, x + part.begin);
      }
      const auto nbytes = static_cast<size_t>(segment.nbytes);
      group_.touch(nbytes + static_cast<size_t>(segment.count) * 4 * sizeof(float));
      sends_.add(group_.send(left_, wire, nbytes));
      if (left_ != right_) sends_.add(group_.send(right_, wire, nbytes));
      if (job_.arrived) job_.arrived(segment.begin, segment.count);
    }
  }

  bool hear(bool waits) {
    const size_t neighbors = left_ == right_ ? 1 : 2;
    for (; heard_ < segments_.size(); ++heard_) {
      for (size_t i = 0; i < neighbors; ++i)
        if (!group_.here(coming_[heard_ * neighbors + i], waits)) return false;
      if (rests()) continue;
      const Stretch& segment = segments_[heard_];
      const CodecTime time(group_);
      coding_.decode_add(from_left_ + segment.at, segment.count, kept(1, segment));
      coding_.decode_add(from_right_ + segment.at, segment.count, kept(2, segment));
      group_.touch(2 * (static_cast<size_t>(segment.nbytes) +
                        static_cast<size_t>(segment.count) * 2 * sizeof(float)));
    }
    return sends_.landed(waits);
  }

 private:
  int64_t wire_nbytes() const { return coding_.wire_nbytes(job_.count); }
  float* kept(size_t which, const Stretch& of) const { return job_.kept[which] + of.begin; }
  // A rank that has joined tells that it did not move, and keeps no copies.
  bool rests() const { return job_.kept[0] == nullptr; }

  Job& job_;
  Group& group_;
  const Coding& coding_;
  const int left_, right_;
  const Shares shares_;
  const std::vector<Stretch> segments_;
  char *mine_ = nullptr, *from_left_ = nullptr, *from_right_ = nullptr;
  std::vector<Ticket> coming_;  // by segment, then by neighbor
  size_t heard_ = 0;            // segments
  Flight sends_;
};

class AllMirrored : public AllUnderWay<Mirrored> {
 public:
  explicit AllMirrored(const Jobs& jobs) : AllUnderWay({&Mirrored::hear}) {
    for (Job* job : jobs) each.emplace_back(*job);
    share_out(jobs[0]->scratch, Scratch::kWire, each);
    for (Mirrored& one : each) one.expect();
    for (Mirrored& one : each) one.move_all();
    if (jobs.back()->values_final) jobs.back()->values_final();
  }
};

}  // namespace

Shares shares_of(const Job& job, int left, int me, int right) {
  const double mine = job.weight_of(me);
  const double l = std::min(1.0, job.weight_of(left) / mine);
  const double r = std::min(1.0, job.weight_of(right) / mine);
  return {static_cast<float>(1 / mine), static_cast<float>(l / 3), static_cast<float>(r / 3),
          static_cast<float>((3 + l + r) / 3)};
}

std::unique_ptr<UnderWay> mirrored(const Jobs& jobs) { return std::make_unique<AllMirrored>(jobs); }

}  // namespace bagua
