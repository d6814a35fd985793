// What a caller asks of the engine, what the ranks must agree on about it, and the handle to wait
// for.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/bytes.h"
#include "common/errors.h"
#include "common/types.h"
#include "device/device.h"

namespace bagua {

// Extent that ranks may choose for themselves: the rows of an allgather or alltoall.
constexpr int64_t kAnyExtent = -1;

// Everything about a request that must be the same on every rank.
struct Description {
  OpKind kind = OpKind::kAllreduce;
  bool on_device = false;   // all its tensors are, on all ranks
  bool captured = false;    // in a graph of the device, which will do it again and again
  bool registered = false;  // its only tensor has all of some memory that NCCL can register
  ReduceOp op = ReduceOp::kSum;
  int32_t root = -1;  // rank of the world; the set's id for remove_process_set
  double prescale = 1;
  double postscale = 1;
  int32_t priority = 0;         // higher goes first among requests agreed together
  std::string codec;            // of an allreduce whose values travel through one, see parse_coding
  std::string peers;            // of an allreduce that is not with everyone, see parse_peers
  bool background = false;      // gives way to everything else
  bool exact_in_nodes = false;  // codec and peers count only between nodes
  int32_t earlier = 0;          // exchanges of these values in this step
  int32_t failures = 0;         // of what would have been exchanged before
  // Per tensor: element type, number of dimensions, dimensions. For add_process_set: the ranks.
  std::vector<int64_t> layout;

  void add_tensor(DType dtype, const int64_t* shape, size_t ndim);
  void add_tensor(DType dtype, const std::vector<int64_t>& shape) {
    add_tensor(dtype, shape.data(), shape.size());
  }
  bool operator==(const Description& other) const;
  std::string encode() const;
  static Description decode(std::string_view bytes);
};

// Words for the first thing in which two descriptions differ: what, and both values.
struct Difference {
  std::string what, here, there;
};
Difference first_difference(const Description& here, const Description& there);

// One tensor of a description, unpacked.
struct TensorInfo {
  DType dtype;
  std::vector<int64_t> shape;
  int64_t count() const;      // elements
  int64_t row_count() const;  // elements in one row: all dimensions but the first
};
std::vector<TensorInfo> tensors_of(const Description& description);

// The same without unpacking: calls f(dtype, dimensions, ndim) for each tensor.
template <class F>
void for_each_tensor(const Description& description, F&& f) {
  if (description.kind == OpKind::kAddProcessSet) return;
  const auto& layout = description.layout;
  for (size_t at = 0; at < layout.size();) {
    const auto ndim = static_cast<size_t>(layout[at + 1]);
    f(static_cast<DType>(layout[at]), layout.data() + at + 2, ndim);
    at += 2 + ndim;
  }
}
inline int64_t count_of(const int64_t* dimensions, size_t ndim) {
  int64_t n = 1;
  for (size_t i = 0; i < ndim; ++i) n *= dimensions[i];
  return n;
}

// Bytes of all its tensors; rows that ranks choose for themselves do not count.
int64_t nbytes_of(const Description& description);

// Memory the engine allocated for a result whose size only the exchange told.
struct Output {
  std::shared_ptr<char> data;
  std::vector<int64_t> rows;  // received from each rank
  bool on_device = false;
  Device::User user = nullptr;  // on a device: who has waited for it last
};

// Completion or a failure. Written by the driving thread before done becomes true, then read-only.
class Handle {
 public:
  Handle() = default;
  ~Handle();
  Handle(const Handle&) = delete;
  bool done() const { return done_.load(std::memory_order_acquire); }
  // The values are there, and stay as they are; the engine may still be at it.
  bool has_values() const { return has_values_.load(std::memory_order_acquire) || done(); }
  const FailurePtr& failure() const { return failure_; }
  void rethrow() const {
    if (failure_) throw_failure(*failure_);
  }

  // Of tensors on a device: what is given to the stream from now on finds the results. Once there
  // are values.
  void make_follow(Device::Stream stream) {
    if (!device_) return;
    if (followed_ != stream) device_->follow(stream, end_);
    followed_ = stream;
    for (const Output& output : outputs)
      if (output.user) *output.user = stream;
  }
  // The stream that what is exchanged belongs to.
  void began_on(Device::Stream stream) { began_on_ = stream; }
  // What the results were written to has a new owner: a stream that follows, as its first owner
  // does. That one does not wait for the outputs.
  void let_go() {
    if (keepalive_ && followed_ != began_on_) device_->follow(began_on_, end_);
    keepalive_.reset();
  }
  // Of a result that other ranks still work at, on the device, nobody knows yet whether it comes.
  void returned_to(Device& device, Device::Mark end, bool may_fail) {
    device_ = &device;
    end_ = std::move(end);
    may_fail_ = may_fail;
  }
  bool may_fail() const { return may_fail_; }
  // Whether nobody would wait for the results, neither the host nor a stream that follows. Of what
  // is done.
  bool reached() const { return !device_ || device_->reached(end_); }
  Device* device() const { return device_; }  // null: the results are in the host's memory

  std::vector<Output> outputs;  // allgather, alltoall: one per tensor
  int64_t value = -1;           // join: the last rank; add_process_set: the id
  // Ranks whose values held a NaN or an Inf, as far as this one has reduced them; see OddRanks. Of
  // all requests that went together.
  std::vector<int> odd;

 private:
  friend class Door;
  FailurePtr failure_;
  Device* device_ = nullptr;
  Device::Mark end_;
  bool may_fail_ = false;
  Device::Stream began_on_ = nullptr;
  std::optional<Device::Stream> followed_;  // by the last that was made to
  std::shared_ptr<void> keepalive_;  // of memory on the device, while results are on their way
  std::atomic<bool> done_{false};
  std::atomic<bool> has_values_{false};
};
using HandlePtr = std::shared_ptr<Handle>;

// One tensor's memory. out may equal in; it is null where the engine allocates the output.
struct Part {
  const char* in = nullptr;
  char* out = nullptr;
  bool on_device = false;  // the request's; else in the host's memory
  bool staged = false;     // brought to the host's memory from there, where the result belongs
};

struct Request {
  std::string name;  // empty: matched by the order of unnamed requests, see seq
  uint64_t seq = 0;  // position among the unnamed requests of the process set, from 1
  int32_t set = 0;
  Description description;
  std::vector<Part> parts;
  Kept kept = {};                         // see Job; where the parts are
  int64_t round = 0;                      // how often this has been exchanged since it was agreed
  std::vector<int64_t> rows;              // allgather, alltoall: this rank's, of each tensor
  std::vector<int64_t> splits;            // alltoall: rows for each rank
  Device* device = nullptr;               // where some parts are, or null
  std::vector<Device::Mark> starts = {};  // of its streams: behind them the values are there
  std::string refusal;                    // not empty: this rank cannot take part, and why
  bool for_good = false;                  // nor ever in anything whose name begins so
  bool stands_in = false;                 // for one of a rank that has joined, without memory yet
  std::shared_ptr<void> keepalive;        // whatever owns the memory, until done
  HandlePtr handle = std::make_shared<Handle>();

  std::string label() const {
    return name.empty() ? std::string(kind_name(description.kind)) + " #" + std::to_string(seq)
                        : name;
  }
};
using RequestPtr = std::shared_ptr<Request>;

}  // namespace bagua
