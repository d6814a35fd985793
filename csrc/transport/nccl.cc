#include "transport/nccl.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "common/clock.h"
#include "common/errors.h"
#include "common/memory.h"
#include "kernel/half.h"

namespace bagua {
namespace {

constexpr double kAbortS = 3;
constexpr double kPromptS = 200e-6;

std::optional<NcclType> type_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
      return NcclType::kU8;
    case DType::kI8:
      return NcclType::kI8;
    case DType::kI32:
      return NcclType::kI32;
    case DType::kI64:
      return NcclType::kI64;
    case DType::kF16:
      return NcclType::kF16;
    case DType::kBF16:
      return NcclType::kBF16;
    case DType::kF32:
      return NcclType::kF32;
    case DType::kF64:
      return NcclType::kF64;
    default:
      return std::nullopt;
  }
}

std::optional<NcclOp> op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return NcclOp::kSum;
    case ReduceOp::kAverage:
      return NcclOp::kAverage;
    case ReduceOp::kProduct:
      return NcclOp::kProduct;
    case ReduceOp::kMin:
      return NcclOp::kMin;
    case ReduceOp::kMax:
      return NcclOp::kMax;
    default:
      return std::nullopt;
  }
}

// A number as an element of some type.
struct Scalar {
  alignas(8) char bytes[8] = {};
  Scalar(double value, DType dtype) {
    if (dtype == DType::kF64) put(value);
    const auto x = static_cast<float>(value);
    if (dtype == DType::kF32) put(x);
    if (dtype == DType::kF16) put(to_f16(x));
    if (dtype == DType::kBF16) put(to_bf16(x));
  }
  template <class T>
  void put(T value) {
    std::memcpy(bytes, &value, sizeof value);
  }
};

constexpr const char* kHint = "; NCCL_DEBUG=WARN tells more, and nccl=False does without NCCL";

// A dead peer, and a network that breaks or refuses, are errors of the system where a socket of
// NCCL's has noticed it, and internal ones where one of its threads has (NVIDIA/nccl#795).
bool blames_others(NcclResult result) {
  return result == NcclResult::kRemoteError || result == NcclResult::kSystemError ||
         result == NcclResult::kInternalError;
}

bool all_alike(const NcclGroup::Counts& counts) {
  return std::all_of(counts.begin(), counts.end(), [&](int64_t n) { return n == counts[0]; });
}

}  // namespace

NcclGroup::NcclGroup(const NcclLibrary& library, Device& device, int size, int me,
                     WaitUntil wait_until)
    : library_(library),
      device_(device),
      size_(size),
      me_(me),
      wait_until_(std::move(wait_until)) {}

void NcclGroup::begin(const NcclId& id) {
  NcclConfig config;
  place_ = std::make_shared<NcclLibrary::Comm>(nullptr);
  device_.as_current([&] {
    begun_ = library_.init_rank_config(place_.get(), size_, id, me_, &config);
    comm_ = __atomic_load_n(place_.get(), __ATOMIC_ACQUIRE);
  });
}

std::string NcclGroup::begun(const std::function<bool()>& pointless) {
  if (comm_ && begun_ == NcclResult::kInProgress)
    wait_until_([&] { return (begun_ = state()) != NcclResult::kInProgress || pointless(); });
  if (begun_ == NcclResult::kSuccess && comm_) begun_ = join();
  if (begun_ == NcclResult::kSuccess && comm_) return "";
  return std::string("ncclCommInitRankConfig: ") + library_.error_string(begun_);
}

// Each by a thread of its own: NCCL ends a communicator when its kernels have ended, and those may
// be queued behind kernels of another one, which end when that is aborted. It also waits for
// threads of its own, and for what else the device has to do: at times for ever.
bool NcclGroup::abort(const std::vector<NcclGroup*>& groups) {
  struct Left {
    std::mutex mutex;
    std::condition_variable changed;
    int count = 0;
  };
  const auto left = std::make_shared<Left>();
  for (NcclGroup* group : groups) {
    auto* comm = std::exchange(group->comm_, nullptr);
    if (!comm) continue;
    const bool counts = !group->captured_;
    const auto end = [left, counts, abort = group->library_.abort, comm, place = group->place_] {
      abort(comm);
      std::lock_guard<std::mutex> lock(left->mutex);
      if (counts) --left->count;
      left->changed.notify_all();
    };
    {
      std::lock_guard<std::mutex> lock(left->mutex);
      if (counts) ++left->count;
    }
    try {
      std::thread(end).detach();
    } catch (const std::system_error&) {  // no more threads here
      end();
    }
  }
  std::unique_lock<std::mutex> lock(left->mutex);
  const bool ended = left->changed.wait_for(lock, std::chrono::duration<double>(kAbortS),
                                            [&] { return left->count == 0; });
  for (NcclGroup* group : groups) {
    if (ended && !group->captured_) continue;
    for (auto& [data, mine] : group->registered_) keep_for_ever(mine.memory);
  }
  return ended;
}

void NcclGroup::end(const std::atomic<bool>& hurries, bool is_last) {
  if (!ends()) return;
  device_.as_current([&] {
    NcclResult result = library_.finalize(comm_);
    for (; result == NcclResult::kInProgress && !hurries; result = state())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    auto* const comm = std::exchange(comm_, nullptr);
    result == NcclResult::kSuccess && !is_last ? library_.destroy(comm) : library_.abort(comm);
  });
}

NcclResult NcclGroup::on_device(const std::function<NcclResult()>& call) {
  NcclResult result = NcclResult::kSuccess;
  device_.as_current([&] { result = call(); });
  return result;
}

void NcclGroup::expect(NcclResult result, const char* what) {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return;
  const std::string text = std::string(what) + ": " + library_.error_string(result);
  if (size_ > 1 && blames_others(result))
    throw PeerError(text + kHint + ", or a rank or the network between them is gone");
  throw InternalError(text + kHint);
}

// What the communicator is about: at it, done, or a failure.
NcclResult NcclGroup::state() {
  NcclResult state = NcclResult::kSuccess;
  const NcclResult asked = library_.get_async_error(comm_, &state);
  return asked == NcclResult::kSuccess ? state : asked;
}

// Before 2.26 what a call has begun is the calling thread's until a function has asked for what the
// communicator is, which the one for errors does not: any other communicator would come upon it.
NcclResult NcclGroup::join() {
  int count = 0;
  return library_.comm_count(comm_, &count);
}

// A communicator that does not block may still be at it, mostly for as long as it takes NCCL to
// start a thread. To fall asleep and be woken would take ten times that. What a single rank asks
// for it does at once.
void NcclGroup::finish(NcclResult result, const char* what) {
  expect(result, what);
  if (result == NcclResult::kSuccess) return;  // done by the call itself
  const auto ready = [&] { return (result = state()) != NcclResult::kInProgress; };
  const double late_s = now_s() + kPromptS;
  bool is_ready = ready();
  while (!is_ready && now_s() < late_s) {
    std::this_thread::yield();
    is_ready = ready();
  }
  if (!is_ready) wait_until_(ready);
  expect(result, what);
  expect(join(), what);
}

void NcclGroup::register_memory(const std::shared_ptr<char>& memory, size_t nbytes) {
  if (registered_.count(memory.get()) > 0) return;
  Registered mine{memory};
  finish(
      on_device([&] { return library_.comm_register(comm_, memory.get(), nbytes, &mine.handle); }),
      "ncclCommRegister");
  registered_[memory.get()] = mine;
}

void NcclGroup::forget_unused() {
  for (auto it = registered_.begin(); it != registered_.end();) {
    const auto next = std::next(it);
    if (it->second.memory.use_count() == 1) {
      const auto gone = registered_.extract(it);
      finish(on_device([&] { return library_.comm_deregister(comm_, gone.mapped().handle); }),
             "ncclCommDeregister");
    }
    it = next;
  }
}

void NcclGroup::check() { expect(state(), "NCCL"); }

// Where the device is current: alone, NCCL launches what scales values on whichever is.
void NcclGroup::together(const std::function<void()>& give) {
  NcclResult result = NcclResult::kSuccess;
  device_.as_current([&] {
    expect(library_.group_start(), "ncclGroupStart");
    try {
      give();
    } catch (...) {
      library_.group_end();  // or this thread would be in it for ever
      throw;
    }
    result = library_.group_end();
  });
  finish(result, "ncclGroupEnd");
}

void NcclGroup::reducing(DType dtype, How how, const std::function<void(NcclOp)>& give) {
  NcclOp op = *op_of(how.op);
  if (how.factor == 1) return together([&] { give(op); });
  Scalar scalar(how.op == ReduceOp::kAverage ? how.factor / size_ : how.factor, dtype);
  finish(on_device([&] {
           return library_.create_scaled_sum(&op, scalar.bytes, *type_of(dtype), kNcclOnHost,
                                             comm_);
         }),
         "ncclRedOpCreatePreMulSum");
  together([&] { give(op); });
  finish(library_.destroy_op(op, comm_), "ncclRedOpDestroy");
}

bool NcclGroup::can_move(DType dtype) { return type_of(dtype).has_value(); }

// Sums of bools and averages of integers are not NCCL's.
bool NcclGroup::can_reduce(DType dtype, ReduceOp op) {
  if (dtype == DType::kBool || !can_move(dtype) || !op_of(op)) return false;
  return op != ReduceOp::kAverage || is_float(dtype);
}

void NcclGroup::allreduce(const std::vector<Piece>& pieces, DType dtype, How how) {
  const auto give = [&](NcclOp op) {
    for (const Piece& p : pieces)
      expect(library_.all_reduce(p.in, p.out, static_cast<size_t>(p.count), *type_of(dtype), op,
                                 comm_, stream_),
             "ncclAllReduce");
  };
  reducing(dtype, how, give);
}

void NcclGroup::broadcast(const std::vector<Piece>& pieces, DType dtype, int root) {
  const auto give = [&] {
    for (const Piece& p : pieces)
      expect(library_.broadcast(p.in, p.out, static_cast<size_t>(p.count), *type_of(dtype), root,
                                comm_, stream_),
             "ncclBroadcast");
  };
  together(give);
}

// What ranks give may differ in size, which NCCL's own allgather does not do.
void NcclGroup::allgather(const char* in, char* out, const Counts& counts, DType dtype) {
  const auto item = static_cast<int64_t>(dtype_nbytes(dtype));
  const auto give = [&] {
    if (all_alike(counts) && counts[0] > 0)
      return expect(library_.all_gather(in, out, static_cast<size_t>(counts[0]), *type_of(dtype),
                                        comm_, stream_),
                    "ncclAllGather");
    for (int rank = 0; rank < size_; ++rank) {
      const int64_t count = counts[static_cast<size_t>(rank)];
      if (count > 0)
        expect(library_.broadcast(rank == me_ ? in : out, out, static_cast<size_t>(count),
                                  *type_of(dtype), rank, comm_, stream_),
               "ncclBroadcast");
      out += count * item;
    }
  };
  together(give);
}

void NcclGroup::reducescatter(const char* in, char* out, const Counts& counts, DType dtype,
                              How how) {
  const auto item = static_cast<int64_t>(dtype_nbytes(dtype));
  const auto give = [&](NcclOp op) {
    if (all_alike(counts) && counts[0] > 0)
      return expect(library_.reduce_scatter(in, out, static_cast<size_t>(counts[0]),
                                            *type_of(dtype), op, comm_, stream_),
                    "ncclReduceScatter");
    for (int rank = 0; rank < size_; ++rank) {
      const int64_t count = counts[static_cast<size_t>(rank)];
      if (count > 0)
        expect(library_.reduce(in, out, static_cast<size_t>(count), *type_of(dtype), op, rank,
                               comm_, stream_),
               "ncclReduce");
      in += count * item;
    }
  };
  reducing(dtype, how, give);
}

void NcclGroup::send(int rank, const char* data, int64_t count, DType dtype) {
  if (count > 0)
    expect(library_.send(data, static_cast<size_t>(count), *type_of(dtype), rank, comm_, stream_),
           "ncclSend");
}

void NcclGroup::receive(int rank, char* data, int64_t count, DType dtype) {
  if (count > 0)
    expect(library_.recv(data, static_cast<size_t>(count), *type_of(dtype), rank, comm_, stream_),
           "ncclRecv");
}

void NcclGroup::alltoall(const char* in, char* out, const Counts& in_counts,
                         const Counts& out_counts, DType dtype) {
  const auto item = static_cast<int64_t>(dtype_nbytes(dtype));
  const auto give = [&] {
    for (int rank = 0; rank < size_; ++rank) {
      const auto i = static_cast<size_t>(rank);
      send(rank, in, in_counts[i], dtype);
      receive(rank, out, out_counts[i], dtype);
      in += in_counts[i] * item;
      out += out_counts[i] * item;
    }
  };
  together(give);
}

void NcclGroup::meet(const char* in, const std::vector<int>& give_to,
                     const std::vector<Place>& take_from, int64_t count, DType dtype) {
  together([&] {
    for (const int rank : give_to) send(rank, in, count, dtype);
    for (const Place& place : take_from) receive(place.rank, place.data, count, dtype);
  });
}

std::shared_ptr<char> nccl_memory(const NcclLibrary& library, Device& device, size_t nbytes) {
  if (!library.registers()) return nullptr;
  void* memory = nullptr;
  NcclResult result = NcclResult::kSuccess;
  device.as_current([&] { result = library.mem_alloc(&memory, std::max<size_t>(nbytes, 1)); });
  if (result != NcclResult::kSuccess)
    throw UsageError("NCCL cannot allocate " + std::to_string(nbytes) + " bytes on " +
                     device.name() + ": " + library.error_string(result) +
                     "; nccl_register=False leaves that to torch");
  // NCCL does not wait, as others who free memory do, for who still uses it.
  return {static_cast<char*>(memory), [&device, mem_free = library.mem_free](char* p) {
            try {
              device.drain_all();
              device.as_current([&] { mem_free(p); });
            } catch (const Error&) {  // the device is broken, or the process ends
            }
          }};
}

}  // namespace bagua
