// Many tensors that are exchanged together, in place, each time all of them are ready. Each has a
// slot in one arena, and may also be exchanged where it is.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace bagua {

class Bucket {
 public:
  // The memory of a device, of so many bytes, zeros.
  using Allocate = std::function<std::shared_ptr<char>(size_t)>;

  // `exchange` describes what the launch asks for, without tensors. What it needs for the next
  // time, see Job::kept, is so many floats per value. That and the arena are in the host's memory,
  // unless there is a device.
  Bucket(std::shared_ptr<Engine> engine, std::string name, DType dtype,
         const std::vector<int64_t>& slot_counts, Description exchange, int32_t set,
         int32_t priority, int kept = 0, Device* device = nullptr, const Allocate& allocate = {});

  ~Bucket();
  Bucket(const Bucket&) = delete;
  // Whether this is memory of some bucket's arena, to which results are written.
  static bool in_an_arena(const char* data);

  const std::shared_ptr<Engine>& engine() const { return engine_; }
  Device* device() const { return device_; }
  char* data() const { return arena_.get(); }
  int64_t nbytes() const { return count_ * static_cast<int64_t>(dtype_nbytes(dtype_)); }
  DType dtype() const { return dtype_; }
  // What is kept for each element of the arena.
  const std::vector<std::shared_ptr<float>>& kept() const { return kept_; }
  int64_t count() const { return count_; }
  // Where each slot begins, in elements; every slot starts on a cache line, unless a codec would
  // see the gaps.
  const std::vector<int64_t>& begins() const { return begins_; }
  // Slots that travel by themselves and may be exchanged where they are: copying one into the arena
  // would cost more than it saves.
  std::vector<bool> large() const;

  // The slot's values are there; saying so again changes nothing. True for the call that makes the
  // last slot ready: then the values must be in the arena and launch() is due. Any thread.
  bool ready(int slot);
  // While a bucket counts quietly, until its launch, only who makes the last slot ready must act.
  void count_quietly(bool quiet) { quiet_ = quiet; }
  bool quiet() const { return quiet_; }
  // Like ready(), but leaves the last slot to somebody who then calls ready(): false for that one.
  bool ready_but_not_last(int slot);
  // On a device: a slot's values come by this stream.
  void came_by(Device::Stream stream);
  // Makes one stream wait for all of those; and, when it has been given what reads the values, all
  // those for it, in whose order the memory of gradients may be used again. If it is captured,
  // those count that are captured with it: others would be drawn into the capture.
  void meet(Device::Stream stream);
  void part(Device::Stream stream);
  // Its arena, which is on a device, is memory that NCCL can register: all ranks' are, or none's.
  // What travels through a codec is elsewhere.
  void use_registered() {
    description_.registered = parts_.size() == 1 && description_.codec.empty();
  }
  // As a launch does. For who exchanges what it makes of the values itself.
  void count_anew();
  // Slots not ready since the last launch.
  std::vector<int> missing() const;
  // Starts the exchange and counts anew. Large slots may be at other places this time, which
  // `keepalive` owns. On a device the values are there from `starts` on.
  struct Place {
    int slot;
    char* data;
  };
  HandlePtr launch(Urgency urgency, const std::vector<Place>& places = {},
                   std::shared_ptr<void> keepalive = nullptr,
                   std::vector<Device::Mark> starts = {});
  // The last launch and their number, which who was interrupted may not know.
  HandlePtr last_launch() const { return last_; }
  int64_t launch_count() const { return launch_count_; }
  // Exchanges before in this step, and backward passes that have failed so far. A later exchange
  // never meets the first one of another rank's next step: that is an error on both.
  void count_steps(int32_t earlier, int32_t failures) {
    description_.earlier = earlier;
    description_.failures = failures;
  }
  int32_t earlier() const { return description_.earlier; }
  int32_t failures() const { return description_.failures; }
  // Bytes that were read and written to bring values into the arena.
  void touch(int64_t nbytes) { engine_->touch(nbytes); }
  // Does not take part this time: throws a UsageError, here and on the ranks that launch.
  void refuse(const std::string& problem);

 private:
  RequestPtr start_over();
  int64_t add_slots(const std::vector<int>& slots, const std::vector<int64_t>& counts);
  void add_part(int64_t begin, int64_t count);

  const std::shared_ptr<Engine> engine_;
  const std::string name_;
  const DType dtype_;
  const int32_t set_;
  Device* const device_;
  std::vector<int64_t> begins_;
  int64_t count_ = 0;  // elements, padding included
  std::shared_ptr<char> arena_;
  std::vector<std::shared_ptr<float>> kept_;
  Description description_;
  std::vector<Part> parts_;
  HandlePtr last_;
  int64_t launch_count_ = 0;
  std::vector<int> part_of_;  // by slot; -1 for one that must be in the arena

  std::atomic<bool> quiet_{false};
  mutable std::mutex mutex_;
  std::vector<bool> is_ready_;           // mutex_
  size_t left_ = 0;                      // mutex_: slots not ready yet
  std::vector<Device::Stream> streams_;  // mutex_
  std::vector<Device::Stream> met_;      // by who gathers
};

}  // namespace bagua
