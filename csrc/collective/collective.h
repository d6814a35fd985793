// What every collective is given, and the table of them. Collectives wait where they have to:
// deadlines and failures arrive as exceptions out of Group::wait. Those that can be begun ahead go
// in steps.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "codec/codec.h"
#include "collective/pace.h"
#include "collective/peers.h"
#include "common/crew.h"
#include "common/scaled.h"
#include "common/types.h"
#include "kernel/reduce.h"
#include "kernel/stream.h"
#include "transport/group.h"

namespace bagua {

// Grow-only memory that lives as long as the engine, so that steady-state exchanges allocate
// next to nothing. Each borrower names a lane, so that two users in one exchange do not collide.
class Scratch {
 public:
  enum Lane { kFusion, kShare, kReceive, kWide, kWire, kCounts, kApart, kLaneCount };

  // What others on this node may look at comes from `arenas`, where there are any.
  explicit Scratch(std::shared_ptr<Arenas> arenas = nullptr) : arenas_(std::move(arenas)) {}
  char* get(Lane lane, size_t nbytes);
  // Of writing past the caches (way 1) or not, into stages or into everybody's arenas, for about so
  // many bytes, by as many threads.
  enum class Into { kStages, kArenas };
  Pace& pace(Into into, OpKind kind, size_t nbytes, int width) {
    size_t at = 0;
    while (at + 1 < kPaces && nbytes >> at) ++at;
    return paces_[{into, kind, width, at}];
  }

 private:
  struct Memory {
    std::shared_ptr<char> data;
    size_t nbytes = 0;
  };
  const std::shared_ptr<Arenas> arenas_;
  Memory lanes_[kLaneCount];
  static constexpr size_t kPaces = 40;
  std::map<std::tuple<Into, OpKind, int, size_t>, Pace> paces_;  // by width, by power of two
};

struct Collective;

// From here on a tensor is worth a job of its own: gathering it would cost more.
constexpr int64_t kLoneNbytes = 512 << 10;

// One exchange of elements of one type. Which fields count depends on the kind:
//   allreduce      data, count                       (in place)
//   broadcast      data, count, root                 (in place)
//   allgather      in, in_counts[me] -> out, out_counts
//   alltoall       in, in_counts     -> out, out_counts
//   reducescatter  in, in_counts     -> out          (in_counts[i] elements go to rank i)
struct Job {
  Group& group;
  Scratch& scratch;
  DType dtype;
  ReduceOp op = ReduceOp::kSum;
  Finish finish = {};
  int root = -1;
  char* data = nullptr;
  int64_t count = 0;
  const char* in = nullptr;
  char* out = nullptr;
  std::vector<int64_t> in_counts = {};
  std::vector<int64_t> out_counts = {};
  // A pipelined collective calls these, if set, before it first looks at elements
  // [begin, begin + count) of data, and when they are final: so that work on both ends overlaps
  // with the exchange.
  std::function<void(int64_t begin, int64_t count)> prepare = {};
  std::function<void(int64_t begin, int64_t count)> arrived = {};
  // Whether nobody here reads the elements of data soon: large ones go past the caches then.
  bool leaves = false;
  // Called, if set, when all elements are final though the exchange goes on. Of several jobs, which
  // are carried out together: the last one's, when those of all are.
  std::function<void()> values_final = {};
  // An allreduce whose data is null: where its elements are instead, all of them in order.
  std::vector<Fragment> fragments = {};
  bool in_company = false;  // of several tensors, which others may join, or leave, the next time
  // An allreduce whose values are to travel through a codec.
  const Coding* coding = nullptr;
  bool exact_in_nodes = false;  // codec and peers count between nodes only, if ranks share any
  // What is remembered from time to time for each element of data, or null. `compressed`: what
  // encoding lost of this rank's values, and of the results that it encodes; `sparse`: the former.
  // `mirrored`: the copies of this rank's values and its neighbors'.
  Kept kept = {};
  std::string_view between_nodes = "auto";  // what leaders are to use among themselves
  std::function<void(const Collective&, const Job&)> chosen = {};  // told of it, if set
  Peers peers = {};               // an allreduce's, if not everyone
  std::vector<int> weights = {};  // how many ranks each of the group stands for; empty: 1
  Crew* crew = nullptr;           // helps with large reductions and copies, if set

  int weight_of(int index) const {
    return weights.empty() ? 1 : weights[static_cast<size_t>(index)];
  }

  size_t item() const { return dtype_nbytes(dtype); }
  size_t nbytes() const { return static_cast<size_t>(count) * item(); }
  // How many threads of this rank can work on it now.
  int width() const;
  // Copies, if wished past the caches; then stream_fence() is due before others are told.
  void copy(void* to, const void* from, size_t nbytes, bool past_caches) const;
  // Reduces this many elements by the job's type and operation. Source i is rank i's of this group,
  // if it is given.
  void reduce(const Targets& targets, const void* const* srcs, int nsrcs, int64_t n, Finish finish,
              const Group* of = nullptr) const;
  // The same of 16-bit floats, not rounded, and times `factor`.
  void reduce_wide(float* to, const void* const* srcs, int nsrcs, int64_t n, double factor) const;
  // Remembers what has come through of such sources, and whose it was, if each is one rank's.
  void note(const OddSources& odd, int nsrcs, const Group* of) const;
  // Rounds so many to 16 bits.
  void narrow(void* to, const float* from, int64_t n) const;
};

// Work on more memory than that is done in parts, so that `touch` can look around in between.
constexpr int64_t kLongNbytes = scaled(32 << 20);

inline void copy(Group& group, void* to, const void* from, size_t nbytes) {
  if (to == from) return;
  for (size_t at = 0; at < nbytes; at += kLongNbytes) {
    const size_t part = std::min<size_t>(kLongNbytes, nbytes - at);
    group.touch(2 * part);
    plain_copy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, part);
  }
}

using Jobs = std::vector<Job*>;

// So many bytes are under way at a time: receives are posted for them. What arrives before it is
// waited for costs MPI memory and copies, and who sends nothing unasked queues its questions behind
// the data: with more than that, links of 1 Gbit/s were idle for a third of the time.
constexpr size_t kAheadNbytes = scaled(64 << 20);

// Gives each of several jobs its part of a lane; returns `head` bytes that are nobody's.
template <class Each>
char* share_out(Scratch& scratch, Scratch::Lane lane, std::deque<Each>& each, size_t head = 0) {
  size_t nbytes = head;
  for (const Each& one : each) nbytes += one.scratch_nbytes();
  char* const memory = scratch.get(lane, nbytes);
  char* at = memory + head;
  for (Each& one : each) {
    one.use(at);
    at += one.scratch_nbytes();
  }
  return memory;
}

// Jobs that are under way: all that others wait for at first has left.
class UnderWay {
 public:
  virtual ~UnderWay() = default;
  // Does what can be done without waiting for anybody.
  virtual void advance() = 0;
  // Does what is left.
  virtual void finish() = 0;
};
// The same for several of a kind, which all do a step before any does the next.
template <class Each>
class AllUnderWay : public UnderWay {
 public:
  void advance() override { go_on(/*waits=*/false); }
  void finish() override { go_on(/*waits=*/true); }

 protected:
  using Step = bool (Each::*)(bool waits);  // whether it is over

  explicit AllUnderWay(std::vector<Step> steps) : steps_(std::move(steps)) {}

  std::deque<Each> each;

 private:
  void go_on(bool waits) {
    for (; step_ < steps_.size(); ++step_, one_ = 0)
      for (; one_ < each.size(); ++one_)
        if (!(each[one_].*steps_[step_])(waits)) return;
  }

  const std::vector<Step> steps_;
  size_t step_ = 0, one_ = 0;
};

struct Collective {
  const char* name;
  OpKind kind;
  bool (*fits)(const Job&);  // whether it can do this job, and should when nobody chose
  bool (*can)(const Job&);   // whether it can do this job at all
  void (*run)(Job&);
  bool pipelined = false;  // calls a job's prepare and arrived
  bool scattered = false;  // takes fragments
  // If set: does several jobs of one group at a time, so that links need not wait between them.
  // What it begins may be finished after other exchanges that were begun before.
  std::unique_ptr<UnderWay> (*begin)(const Jobs&) = nullptr;
};

const std::vector<Collective>& collectives();

// What a user wants: "<for all>" or "<for all>+<between nodes>".
struct Choice {
  explicit Choice(const std::string& wanted);
  std::string for_all, between_nodes = "auto";
};
// The row named `wanted` where it can do the job, else the first of its kind that fits.
const Collective& choose_collective(OpKind kind, const Job& job, std::string_view wanted);

// One file each, but for the last four, which only move bytes: shared_moves.cc has them.
void gather_reduce(Job& job);
std::unique_ptr<UnderWay> scatter_reduce(const Jobs& jobs);
void ring(Job& job);
void halving(Job& job);
void adasum(Job& job);
std::unique_ptr<UnderWay> compressed(const Jobs& jobs);
std::unique_ptr<UnderWay> sparse(const Jobs& jobs);
void neighbors(Job& job);
std::unique_ptr<UnderWay> mirrored(const Jobs& jobs);
void broadcast(Job& job);
void allgather(Job& job);
void alltoall(Job& job);
void reducescatter(Job& job);
void shared(Job& job);
void hierarchical(Job& job);
void shared_broadcast(Job& job);
void shared_allgather(Job& job);
void shared_alltoall(Job& job);
void shared_reducescatter(Job& job);

}  // namespace bagua
