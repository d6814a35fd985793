// NCCL's functions, done by threads: what is given to a stream of a pretended device waits there
// for the other ranks. Communicators prepare for a while, after each group, too. They reduce
// floats, of 32 and 16 bits; those of 16 they round whenever they add. Those of a single rank lose
// the last value of what they scale, as before 2.29.7.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "device/nccl_library.h"
#include "device/pretend.h"
#include "kernel/half.h"

namespace bagua {

// What ranks with one id have in common.
struct FakeNcclWorld {
  struct Round {
    std::vector<const char*> ins;
    std::vector<bool> registered;
    std::vector<char> result;
    int arrived = 0;
  };
  explicit FakeNcclWorld(int size) : size(size) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  int begun = 0;
  std::map<int64_t, Round> rounds;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> letters;  // by from and to
};

}  // namespace bagua

struct bagua::NcclCommunicator {
  NcclCommunicator(std::shared_ptr<bagua::FakeNcclWorld> world, int rank)
      : world(std::move(world)), rank(rank) {}
  std::shared_ptr<bagua::FakeNcclWorld> world;
  int rank;
  NcclCommunicator** place = nullptr;  // where whoever began it wants it
  int64_t round = 0;
  void* stream = nullptr;  // the last that was used
  int looks_until_ready = 5;
  bool aborted = false;  // under the world's mutex
  std::atomic<std::thread::id> at_it =
      std::thread::id();       // who has begun what it is at, and has not joined it
  bool broken = false;         // and says so, a while after it has begun
  std::vector<float> factors;  // of operations made with one
};

namespace bagua {

class FakeNccl {
 public:
  static const NcclLibrary& library() {
    static const NcclLibrary all = [] {
      NcclLibrary l;
      l.version = 23203;
      l.error_string = [](NcclResult) { return "a fake error"; };
      l.get_unique_id = [](NcclId* id) {
        const int mine = ++ids_;
        std::memcpy(id->bytes, &mine, sizeof mine);
        return NcclResult::kSuccess;
      };
      l.init_rank_config = init;
      l.get_async_error = [](Comm comm, NcclResult* state) {
        const bool looked = comm->looks_until_ready == 0 || --comm->looks_until_ready == 0;
        std::lock_guard<std::mutex> lock(comm->world->mutex);
        const bool ready = looked && (comm->broken || comm->world->begun == comm->world->size);
        *state = ready ? NcclResult::kSuccess : NcclResult::kInProgress;
        if (comm->world->size == lost_size_) *state = NcclResult::kRemoteError;
        if (ready && comm->broken) *state = NcclResult::kSystemError;
        return NcclResult::kSuccess;
      };
      l.comm_count = [](Comm comm, int* count) {
        *count = comm->world->size;
        return join(comm);
      };
      l.finalize = [](Comm comm) {
        note_use_of_device();
        ++finalized_;
        return begin(comm, never_ends_ ? 1 << 30 : 3);
      };
      l.destroy = [](Comm comm) {
        if (join(comm) != NcclResult::kSuccess) ++misused_;
        ++destroyed_;
        forget_memory(comm);
        while (held_) std::this_thread::yield();
        return NcclResult::kSuccess;
      };
      l.abort = abort;
      l.group_start = [] {
        if (at_it_ && at_it_->at_it == std::this_thread::get_id()) return kInvalidUsage;
        ++depth_;
        return NcclResult::kSuccess;
      };
      l.group_end = [] {
        if (--depth_ > 0) return NcclResult::kSuccess;
        const bool any = !in_group_.empty();
        for (const Comm comm : in_group_) begin(comm, 2);
        in_group_.clear();
        return any ? NcclResult::kInProgress : NcclResult::kSuccess;
      };
      l.all_reduce = all_reduce;
      l.broadcast = broadcast;
      l.all_gather = all_gather;
      l.reduce = reduce;
      l.reduce_scatter = reduce_scatter;
      l.send = send;
      l.recv = recv;
      l.create_scaled_sum = [](NcclOp* op, void* scalar, NcclType type, int, Comm comm) {
        note_use_of_device();
        comm->factors.push_back(load(type, static_cast<const char*>(scalar), 0));
        *op = static_cast<NcclOp>(5 + comm->factors.size() - 1);
        return NcclResult::kSuccess;
      };
      l.destroy_op = [](NcclOp, Comm) { return NcclResult::kSuccess; };
      l.mem_alloc = [](void** memory, size_t nbytes) {
        note_use_of_device();
        *memory = new char[nbytes];
        ++allocated_;
        return NcclResult::kSuccess;
      };
      l.mem_free = [](void* memory) {
        note_use_of_device();
        std::lock_guard<std::mutex> lock(registering_);
        if (registered_.count(memory) > 0) ++misused_;
        --allocated_;
        delete[] static_cast<char*>(memory);
        return NcclResult::kSuccess;
      };
      l.comm_register = [](Comm comm, void* memory, size_t, void** handle) {
        note_use_of_device();
        std::lock_guard<std::mutex> lock(registering_);
        if (!registered_.emplace(memory, comm).second) ++misused_;
        *handle = memory;
        return NcclResult::kSuccess;
      };
      l.comm_deregister = [](Comm comm, void* handle) {
        note_use_of_device();
        std::lock_guard<std::mutex> lock(registering_);
        const auto found = registered_.find(handle);
        if (found == registered_.end() || found->second != comm) ++misused_;
        registered_.erase(handle);
        return NcclResult::kSuccess;
      };
      return l;
    }();
    return all;
  }
  static int calls() { return calls_; }
  static int ids() { return ids_; }
  // Communicators that a rank has begun.
  static int begun() { return begun_; }
  // Memory of NCCL's there is; what is registered of it; what was done to it that must not be, or
  // where no device was current, or given to an operation by some ranks only.
  static int allocated() { return allocated_; }
  static size_t registered() {
    std::lock_guard<std::mutex> lock(registering_);
    return registered_.size();
  }
  static int misused() { return misused_; }
  static int finalized() { return finalized_; }
  static int destroyed() { return destroyed_; }
  // Whether what is finalized never gets there.
  static void hold_finalized(bool never) { never_ends_ = never; }
  static int aborted() { return aborted_; }
  // Whether communicators take their time to be destroyed, as if the device were busy.
  static void hold_destroyed(bool held) { held_ = held; }
  // Of this thread: groups that have begun and not ended.
  static int depth() { return depth_; }
  // From now on an abort returns when so many have begun, of communicators that use a stream, as if
  // each waited for kernels of the others. True if that has always been so.
  static void abort_together(int count) {
    std::lock_guard<std::mutex> lock(aborting_mutex_);
    aborting_.clear();
    together_ = count;
  }
  static bool aborted_together() { return !lonely_; }
  // Aborts that have begun and not ended.
  static int under_abort() { return under_abort_; }
  // Whether aborts end what is under way and then hang.
  static void hang_aborts(bool hang) { hang_ = hang; }
  // On this rank, or on none, a communicator does not come about, and says so at once, when asked,
  // or never. Those of the others wait for it until they are aborted. If a size is given only those
  // of so many ranks do so, among whom this one is meant.
  enum class Says { kAtOnce, kLater, kNever };
  static void break_on(int rank, Says says = Says::kAtOnce, int size = 0) {
    broken_ = rank;
    says_ = says;
    broken_size_ = size;
  }
  // From now on communicators of so many ranks say that another one is gone.
  static void lose_peers_of(int size) { lost_size_ = size; }
  // The next call that moves something fails.
  static void fail_next(NcclResult how = NcclResult::kRemoteError) { fails_ = how; }

 private:
  using Comm = NcclLibrary::Comm;
  static constexpr auto kInvalidArgument = static_cast<NcclResult>(4);
  static constexpr auto kInvalidUsage = static_cast<NcclResult>(5);

  static void note_use_of_device() {
    if (!PretendDevice::is_current()) ++misused_;
  }

  // Of old versions: a thread may turn to another communicator, or end, when it has joined what it
  // began of the one before, which then must be ready. An abort ends that, too.
  static NcclResult begin(Comm comm, int looks) {
    const auto me = std::this_thread::get_id();
    if (at_it_ && at_it_ != comm && at_it_->at_it == me) return kInvalidUsage;
    comm->looks_until_ready = looks;
    comm->at_it = me;
    at_it_ = comm;
    return NcclResult::kInProgress;
  }
  static NcclResult join(Comm comm) {
    if (comm->looks_until_ready > 0) return kInvalidArgument;
    const bool by_another = comm->at_it.load() != std::thread::id() && at_it_ != comm;
    if (by_another) return kInvalidUsage;
    comm->at_it = std::thread::id();
    at_it_ = nullptr;
    return NcclResult::kSuccess;
  }

  // What is given to a communicator must be in a group here, where the device is current, and not
  // while it still prepares.
  static NcclResult enter(Comm comm) {
    if (depth_ == 0 || comm->looks_until_ready > 0 || !PretendDevice::is_current())
      return kInvalidUsage;
    const NcclResult failure = fails_.exchange(NcclResult::kSuccess);
    if (failure != NcclResult::kSuccess) return failure;
    in_group_.push_back(comm);
    return NcclResult::kSuccess;
  }

  static NcclResult init(Comm* comm, int size, NcclId id, int rank, NcclConfig* config) {
    static std::mutex mutex;
    static std::map<int, std::shared_ptr<FakeNcclWorld>> worlds;
    if (config->magic != 0xcafebeefu || config->blocking != 0) return kInvalidArgument;
    int number;
    std::memcpy(&number, id.bytes, sizeof number);
    std::lock_guard<std::mutex> lock(mutex);
    auto& world = worlds[number];
    if (!world) world = std::make_shared<FakeNcclWorld>(size);
    if (world->size != size) return kInvalidArgument;
    ++begun_;
    // Never freed: work under way may look at them, and so may an abort while the process ends.
    static auto& all = *new std::vector<std::unique_ptr<NcclCommunicator>>;
    all.push_back(std::make_unique<NcclCommunicator>(world, rank));
    *comm = all.back().get();
    (*comm)->place = comm;
    const bool breaks = rank == broken_ && (broken_size_ == 0 || broken_size_ == size);
    (*comm)->broken = breaks && says_ != Says::kNever;
    if (breaks && says_ == Says::kAtOnce) return NcclResult::kSystemError;
    std::lock_guard<std::mutex> world_lock(world->mutex);
    if (!breaks) ++world->begun;
    return begin(*comm, (*comm)->looks_until_ready);
  }

  static NcclResult abort(Comm comm) {
    ++aborted_;
    ++under_abort_;
    comm->at_it = std::thread::id();
    {
      std::lock_guard<std::mutex> lock(comm->world->mutex);
      comm->aborted = true;
      comm->world->changed.notify_all();
    }
    auto all_begun = [comm, begins = true]() mutable {
      std::lock_guard<std::mutex> lock(aborting_mutex_);
      aborting_[comm->stream] += std::exchange(begins, false);
      return aborting_[comm->stream] >= together_;
    };
    const double late_s = now_s() + 5;
    bool together = all_begun();
    for (; !together && now_s() < late_s; together = all_begun()) std::this_thread::yield();
    if (!together) lonely_ = true;
    while (hang_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    *comm->place = comm;  // as the thread that begins it, for which an abort waits, does at its end
    forget_memory(comm);
    --under_abort_;
    return NcclResult::kSuccess;
  }

  static size_t nbytes_of(NcclType type) {
    if (type == NcclType::kU8 || type == NcclType::kI8) return 1;
    if (type == NcclType::kF16 || type == NcclType::kBF16) return 2;
    return type == NcclType::kI64 || type == NcclType::kF64 ? 8 : 4;
  }
  static void on(void* stream, std::function<void()> work) {
    static PretendDevice device(0);
    ++calls_;
    device.run(stream, std::move(work));
  }

  // On a stream: waits for all, and `combine` makes the result of what they gave, `nbytes` of
  // which, `from` this place on, come to this rank.
  template <class Combine>
  static NcclResult give(const void* in, void* out, size_t from, size_t nbytes, Comm comm,
                         void* stream, Combine combine) {
    if (const NcclResult refused = enter(comm); refused != NcclResult::kSuccess) return refused;
    const auto world = comm->world;
    const int rank = comm->rank;
    comm->stream = stream;
    on(stream, [=] {
      std::unique_lock<std::mutex> lock(world->mutex);
      if (comm->aborted) return;
      auto& round = world->rounds[comm->round++];
      round.ins.resize(static_cast<size_t>(world->size));
      round.ins[static_cast<size_t>(rank)] = static_cast<const char*>(in);
      round.registered.push_back(is_registered(in, comm) && is_registered(out, comm));
      if (round.registered.back() != round.registered.front()) ++misused_;
      if (++round.arrived == world->size) {
        combine(round.ins, round.result);
        world->changed.notify_all();
      }
      world->changed.wait(lock, [&] { return round.arrived == world->size || comm->aborted; });
      if (round.arrived < world->size) {  // nobody reads what this rank is not waiting for any more
        --round.arrived;
        return;
      }
      std::memcpy(out, round.result.data() + from, nbytes);
    });
    return NcclResult::kSuccess;
  }

  static void forget_memory(Comm comm) {
    std::lock_guard<std::mutex> lock(registering_);
    for (auto it = registered_.begin(); it != registered_.end();)
      it = it->second == comm ? registered_.erase(it) : std::next(it);
  }
  static bool is_registered(const void* memory, Comm comm) {
    std::lock_guard<std::mutex> lock(registering_);
    const auto found = registered_.find(const_cast<void*>(memory));
    return found != registered_.end() && found->second == comm;
  }

  static bool reduces(NcclType type) {
    return type == NcclType::kF32 || type == NcclType::kF16 || type == NcclType::kBF16;
  }
  static float load(NcclType type, const char* from, size_t i) {
    if (type == NcclType::kF16) return to_float(reinterpret_cast<const F16*>(from)[i]);
    if (type == NcclType::kBF16) return to_float(reinterpret_cast<const BF16*>(from)[i]);
    return reinterpret_cast<const float*>(from)[i];
  }
  static float rounded(NcclType type, float x) {
    if (type == NcclType::kF16) return to_float(to_f16(x));
    return type == NcclType::kBF16 ? to_float(to_bf16(x)) : x;
  }
  static void store(NcclType type, char* to, size_t i, float x) {
    if (type == NcclType::kF16) reinterpret_cast<F16*>(to)[i] = to_f16(x);
    if (type == NcclType::kBF16) reinterpret_cast<BF16*>(to)[i] = to_bf16(x);
    if (type == NcclType::kF32) reinterpret_cast<float*>(to)[i] = x;
  }

  // Makes the reduction of count values.
  static auto reducing(size_t count, NcclType type, NcclOp op, Comm comm) {
    const int number = static_cast<int>(op);
    const auto size = static_cast<float>(comm->world->size);
    float factor = number >= 5 ? comm->factors[static_cast<size_t>(number - 5)] : 1.0f;
    if (op == NcclOp::kAverage && type != NcclType::kF32) factor = rounded(type, 1 / size);
    const bool loses = size == 1 && (op == NcclOp::kAverage || number >= 5);
    return [=](const std::vector<const char*>& ins, std::vector<char>& result) {
      result.resize(count * nbytes_of(type));
      const bool divides = op == NcclOp::kAverage && type == NcclType::kF32;  // at the end
      for (size_t i = 0; i < count - (loses ? 1 : 0); ++i) {
        float x = op == NcclOp::kMax ? -1e30f : 0.0f;
        for (const char* one : ins) {
          const float theirs = rounded(type, load(type, one, i) * factor);
          x = op == NcclOp::kMax ? std::max(x, theirs) : rounded(type, x + theirs);
        }
        store(type, result.data(), i, divides ? x / size : x);
      }
    };
  }

  static NcclResult all_reduce(const void* in, void* out, size_t count, NcclType type, NcclOp op,
                               Comm comm, void* stream) {
    if (!reduces(type)) return kInvalidArgument;
    return give(in, out, 0, count * nbytes_of(type), comm, stream, reducing(count, type, op, comm));
  }
  static NcclResult reduce(const void* in, void* out, size_t count, NcclType type, NcclOp op,
                           int root, Comm comm, void* stream) {
    if (!reduces(type)) return kInvalidArgument;
    const size_t taken = root == comm->rank ? count * nbytes_of(type) : 0;
    return give(in, out, 0, taken, comm, stream, reducing(count, type, op, comm));
  }
  static NcclResult reduce_scatter(const void* in, void* out, size_t count, NcclType type,
                                   NcclOp op, Comm comm, void* stream) {
    if (!reduces(type)) return kInvalidArgument;
    const auto all = count * static_cast<size_t>(comm->world->size);
    const size_t nbytes = count * nbytes_of(type);
    return give(in, out, static_cast<size_t>(comm->rank) * nbytes, nbytes, comm, stream,
                reducing(all, type, op, comm));
  }
  static NcclResult broadcast(const void* in, void* out, size_t count, NcclType type, int root,
                              Comm comm, void* stream) {
    const size_t nbytes = count * nbytes_of(type);
    return give(in, out, 0, nbytes, comm, stream, [=](const auto& ins, std::vector<char>& result) {
      const char* theirs = ins[static_cast<size_t>(root)];
      result.assign(theirs, theirs + nbytes);
    });
  }
  static NcclResult all_gather(const void* in, void* out, size_t count, NcclType type, Comm comm,
                               void* stream) {
    const size_t nbytes = count * nbytes_of(type);
    const auto size = static_cast<size_t>(comm->world->size);
    return give(in, out, 0, nbytes * size, comm, stream,
                [=](const auto& ins, std::vector<char>& result) {
                  for (const char* one : ins) result.insert(result.end(), one, one + nbytes);
                });
  }

  static NcclResult send(const void* in, size_t count, NcclType type, int to, Comm comm,
                         void* stream) {
    if (const NcclResult refused = enter(comm); refused != NcclResult::kSuccess) return refused;
    const auto world = comm->world;
    const std::pair<int, int> way = {comm->rank, to};
    const auto* bytes = static_cast<const char*>(in);
    on(stream, [=] {
      std::lock_guard<std::mutex> lock(world->mutex);
      world->letters[way].emplace_back(bytes, bytes + count * nbytes_of(type));
      world->changed.notify_all();
    });
    return NcclResult::kSuccess;
  }
  static NcclResult recv(void* out, size_t count, NcclType type, int from, Comm comm,
                         void* stream) {
    if (const NcclResult refused = enter(comm); refused != NcclResult::kSuccess) return refused;
    const auto world = comm->world;
    const std::pair<int, int> way = {from, comm->rank};
    on(stream, [=] {
      std::unique_lock<std::mutex> lock(world->mutex);
      auto& letters = world->letters[way];
      world->changed.wait(lock, [&] { return !letters.empty() || comm->aborted; });
      if (letters.empty()) return;
      if (letters.front().size() == count * nbytes_of(type))
        std::memcpy(out, letters.front().data(), letters.front().size());
      letters.pop_front();
    });
    return NcclResult::kSuccess;
  }

  static inline std::atomic<int> calls_{0}, finalized_{0}, destroyed_{0}, aborted_{0}, together_{0};
  static inline std::atomic<int> allocated_{0}, misused_{0}, under_abort_{0};
  static inline std::mutex registering_;
  // By its beginning; registering_.
  static inline auto& registered_ = *new std::map<void*, NcclCommunicator*>;
  static inline std::mutex aborting_mutex_;
  // By stream; aborting_mutex_. Never freed: an abort may still be under way when the process ends.
  static inline auto& aborting_ = *new std::map<void*, int>;
  static inline std::atomic<NcclResult> fails_{NcclResult::kSuccess};
  static inline std::atomic<bool> lonely_{false}, held_{false}, hang_{false}, never_ends_{false};
  static inline std::atomic<Says> says_{Says::kAtOnce};
  static inline std::atomic<int> broken_{-1}, broken_size_{0}, lost_size_{0};
  static inline std::atomic<int> ids_{0}, begun_{0};
  static inline thread_local int depth_ = 0;
  static inline thread_local std::vector<Comm> in_group_;
  static inline thread_local Comm at_it_ = nullptr;
};

}  // namespace bagua
