// What the engine itself takes for an exchange on a device, where there is none: `make
// bench-exchange`.
//
// Device (csrc/device/device.h) and NCCL are functions that return at once and count how often they
// are called, so what is left is the engine: from the launch of a bucket until the caller's stream
// waits for its sum. One by one each bucket is waited for before the next; together, all are given
// before any is waited for, as in a step. Ranks are threads, whose messages take the shortest way
// there is; beyond cores they wait for each other.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "control/loopback_channel.h"
#include "device/device.h"
#include "device/nccl_library.h"
#include "engine/bucket.h"
#include "engine/engine.h"
#include "transport/loopback.h"

namespace {

using namespace bagua;

constexpr int kBuckets = 50;
constexpr int kRounds = 400;
constexpr int kWarmup = 20;
constexpr double kLimitS = 60;

struct Calls {
  std::atomic<int64_t> device{0}, nccl{0};
} calls;

const NcclLibrary& idle_nccl() {
  static const NcclLibrary all = [] {
    using Comm = NcclLibrary::Comm;
    static std::atomic<int> ranks{0};
    const auto nothing = [](Comm) { return NcclResult::kSuccess; };
    const auto group = [] {
      ++calls.nccl;
      return NcclResult::kSuccess;
    };
    NcclLibrary l;
    l.version = 23203;
    l.error_string = [](NcclResult) { return "no error"; };
    l.get_unique_id = [](NcclId* id) {
      std::memset(id, 0, sizeof *id);
      return NcclResult::kSuccess;
    };
    l.init_rank_config = [](Comm* comm, int size, NcclId, int, NcclConfig*) {
      ranks = size;
      *comm = reinterpret_cast<Comm>(&ranks);
      return NcclResult::kSuccess;
    };
    l.get_async_error = [](Comm, NcclResult* state) {
      ++calls.nccl;
      *state = NcclResult::kSuccess;
      return NcclResult::kSuccess;
    };
    l.comm_count = [](Comm, int* count) {
      *count = ranks;
      return NcclResult::kSuccess;
    };
    l.finalize = l.destroy = l.abort = nothing;
    l.group_start = l.group_end = group;
    l.all_reduce = [](const void*, void*, size_t, NcclType, NcclOp, Comm, NcclLibrary::Stream) {
      ++calls.nccl;
      return NcclResult::kSuccess;
    };
    return l;
  }();
  return all;
}

class IdleDevice : public Device {
 public:
  explicit IdleDevice(int rank) : identity_(16, static_cast<char>(rank)) {}
  std::string name() const override { return "an idle device"; }
  int number() const override { return 0; }
  std::string identity() const override { return identity_; }
  Mark mark(Stream) override {
    ++calls.device;
    return std::make_shared<int>();
  }
  void follow(Stream, const Mark&) override { ++calls.device; }
  bool reached(const Mark&) override {
    ++calls.device;
    return true;
  }
  bool captured(const Mark&) const override { return false; }
  void copy(void* to, const void* from, size_t nbytes, Stream) override {
    std::memcpy(to, from, nbytes);
  }
  void drain(Stream) override {}
  void drain_all() override {}
  std::shared_ptr<char> allocate(size_t nbytes) override {
    return {new char[nbytes](), std::default_delete<char[]>()};
  }
  void clear(char* memory, size_t nbytes, Stream) override { std::memset(memory, 0, nbytes); }
  const NcclLibrary* nccl(const std::string&, std::string&) override { return &idle_nccl(); }
  Stream add_stream() override { return &streams_.emplace_back(); }
  void as_current(const std::function<void()>& work) override {
    ++calls.device;
    work();
  }
  std::shared_ptr<char> pin(std::shared_ptr<char> memory, size_t) override { return memory; }

 private:
  const std::string identity_;
  std::deque<char> streams_;
};

class Rank {
 public:
  Rank(int rank, const Config& config, LoopbackHub& hub, LoopbackSwitchboard& board,
       std::vector<std::string> names)
      : device_(rank),
        engine_(std::make_shared<Engine>(config, hub.connect(rank), board.connect(rank),
                                         std::move(names))) {
    Description sum;
    sum.op = ReduceOp::kSum;
    sum.on_device = true;
    for (int i = 0; i < kBuckets; ++i)
      buckets_.push_back(std::make_unique<Bucket>(
          engine_, "bucket." + std::to_string(i), DType::kF32, std::vector<int64_t>{1024}, sum,
          /*set=*/0, /*priority=*/0, /*kept=*/0, &device_,
          [this](size_t nbytes) { return device_.allocate(nbytes); }));
  }
  void one_by_one() {
    for (const auto& bucket : buckets_) wait(launch(*bucket));
  }
  void together() {
    std::vector<HandlePtr> handles;
    for (const auto& bucket : buckets_) handles.push_back(launch(*bucket));
    for (const HandlePtr& handle : handles) wait(handle);
  }
  void stop() { engine_->stop(); }
  void wait_stopped() { engine_->wait_stopped(kLimitS); }

 private:
  HandlePtr launch(Bucket& bucket) {
    HandlePtr handle = bucket.launch(Urgency::kNow, {}, nullptr, {device_.mark(&stream_)});
    handle->began_on(&stream_);
    return handle;
  }
  void wait(const HandlePtr& handle) {
    if (!engine_->wait(*handle, kLimitS)) {
      std::fprintf(stderr, "an exchange has not ended after %g s\n", kLimitS);
      std::_Exit(1);
    }
    handle->make_follow(&stream_);
    handle->let_go();
  }

  IdleDevice device_;
  char stream_ = 0;  // its address is the caller's
  std::shared_ptr<Engine> engine_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
};

struct Way {
  const char* name;
  void (Rank::*run)();
};

void measure(int size, const Way& way) {
  Config config;
  config.log_level = "error";
  LoopbackHub hub(size);
  LoopbackSwitchboard board(size);
  std::vector<std::string> names;
  for (int rank = 0; rank < size; ++rank) names.push_back("rank " + std::to_string(rank));
  std::deque<Rank> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(rank, config, hub, board, names);
  std::vector<double> us;
  std::vector<std::thread> threads;
  int64_t of_device = 0, of_nccl = 0;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      for (int round = 0; round < kRounds; ++round) {
        if (rank == 0 && round == kWarmup) of_device = calls.device, of_nccl = calls.nccl;
        const double start = now_s();
        (ranks[static_cast<size_t>(rank)].*way.run)();
        if (rank == 0 && round >= kWarmup) us.push_back((now_s() - start) / kBuckets * 1e6);
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::sort(us.begin(), us.end());
  const double exchanges = static_cast<double>(kRounds - kWarmup) * kBuckets * size;
  std::printf("%5d  %-12s %6.1f us  %6.1f us  %9.1f  %9.1f\n", size, way.name, us[us.size() / 2],
              us.front(), static_cast<double>(calls.device - of_device) / exchanges,
              static_cast<double>(calls.nccl - of_nccl) / exchanges);
  for (Rank& rank : ranks) rank.stop();
  for (Rank& rank : ranks) rank.wait_stopped();
}

}  // namespace

int main() {
  std::printf("an exchange of a bucket, of %d in a row; median and least of %d rounds\n", kBuckets,
              kRounds - kWarmup);
  std::printf("%5s  %-12s %9s  %9s  %9s  %9s\n", "ranks", "", "median", "least", "of Device",
              "of NCCL");
  for (const int size : {1, 2})
    for (const Way& way : {Way{"one by one", &Rank::one_by_one}, Way{"together", &Rank::together}})
      measure(size, way);
  std::printf("of Device, of NCCL: how often their functions were called for it\n");
}
