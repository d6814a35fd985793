// A device that is this machine: memory of the host that only its streams should touch, and threads
// for streams, which take their time. For tests of what must wait for what.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/device.h"

namespace bagua {

class PretendDevice : public Device {
 public:
  // Every piece of work takes so long.
  explicit PretendDevice(int work_us);
  ~PretendDevice() override;

  std::string name() const override { return "a pretended device"; }
  int number() const override { return 0; }
  std::string identity() const override { return identity_; }
  // As if it were another one: 16 bytes.
  void be(std::string identity) { identity_ = std::move(identity); }
  // The default stream is the thread that asks: what it is given is done when the call returns.
  Mark mark(Stream stream) override;
  void follow(Stream stream, const Mark& mark) override;
  bool reached(const Mark& mark) override;
  bool captured(const Mark& mark) const override;
  void copy(void* to, const void* from, size_t nbytes, Stream stream) override;
  void drain(Stream stream) override;
  void drain_all() override;
  std::shared_ptr<char> allocate(size_t nbytes) override;
  void clear(char* memory, size_t nbytes, Stream stream) override;
  Stream add_stream() override;
  std::shared_ptr<char> pin(std::shared_ptr<char> memory, size_t nbytes) override;

  const NcclLibrary* nccl(const std::string&, std::string&) override { return nccl_; }
  void use_nccl(const NcclLibrary* library) { nccl_ = library; }
  bool runs_kernels() const override { return !is_old_; }
  void be_old() { is_old_ = true; }

  // How often it has given memory, and how much it has at most.
  int allocations() const { return allocations_; }
  void has(int64_t nbytes) { shared_->left_nbytes = nbytes; }

  // From now on it is broken: whoever asks it something hears so.
  void fail() { failed_ = true; }
  void as_current(const std::function<void()>& work) override;
  // Whether the calling thread is in as_current.
  static bool is_current();
  bool works_on_host(Stream stream, const std::function<void()>& work) override {
    run(stream, work);
    return true;
  }
  // Gives a stream any work.
  void run(Stream stream, std::function<void()> work);
  // What the stream, and those that follow it, are given until the end is not done but noted; a
  // stream can be given that any number of times.
  class Graph;
  std::shared_ptr<Graph> capture(Stream stream);
  static void end(Graph& graph);
  void replay(Stream stream, const std::shared_ptr<Graph>& graph);

 private:
  struct Worker;
  struct Reached;

  void check() const;
  // Who lets go of memory waits for all that the device does; nobody does so on a stream, or while
  // another thread ends the device.
  void drain_to_free();

  const int work_us_;
  const NcclLibrary* nccl_ = nullptr;
  bool is_old_ = false;
  // Memory may be let go of after the device.
  struct Shared {
    std::atomic<int64_t> left_nbytes{INT64_MAX};
    std::atomic<PretendDevice*> device;  // null: it is gone
  };
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::string identity_;
  std::atomic<bool> failed_{false};
  std::atomic<int> allocations_{0};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace bagua
