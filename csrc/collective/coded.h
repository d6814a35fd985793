// What the collectives that send through a codec have in common. Only floats of 32 bits are coded,
// whatever a job's elements are.
#pragma once

#include <vector>

#include "collective/collective.h"
#include "common/clock.h"

namespace bagua {

inline bool float_like(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// A job's elements as floats.
struct Floats {
  Job& job;
  float* data;
};
class AsFloats {
 public:
  explicit AsFloats(const Jobs& jobs);
  const std::vector<Floats>& all() const { return all_; }
  // What is there now is the jobs'.
  void give_back() const;

 private:
  std::vector<Floats> all_;
};

// Values that are worked on at a time, small enough for a core's cache; a multiple of every block.
constexpr int64_t kTile = scaled(32 << 10);

// Consecutive values, and where their bytes are in a wire.
struct Stretch {
  int64_t begin, count;
  int64_t at, nbytes;
};

// `count` values from `begin` on, `step` at a time; 0: as many as are worth a message.
std::vector<Stretch> stretches(const Coding& coding, int64_t begin, int64_t count,
                               int64_t step = 0);

// Whether what a sparse codec keeps of so many values goes as an exact allreduce of all of them:
// that takes fewer bytes then than everyone's wire for everyone.
inline bool goes_densely(int size, int64_t wire_nbytes, int64_t count) {
  return size * wire_nbytes > 2 * 4 * count;
}

// Counts the time until its end as the codec's.
class CodecTime {
 public:
  explicit CodecTime(Group& group) : group_(group) {}
  ~CodecTime() { group_.spend_in_codec(now_s() - began_s_); }
  CodecTime(const CodecTime&) = delete;

 private:
  Group& group_;
  const double began_s_ = now_s();
};

// Adds up what wires say, of each rank of the job's group.
void add_up(const Job& job, const std::vector<const char*>& said, int64_t count, float* sum);

// Encodes these of the values in `data`; `residual`, null or for all of data, says what is lost.
void encode(Job& job, const float* data, float* residual, const Stretch& stretch, char* wire);

}  // namespace bagua
