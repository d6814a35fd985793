#include "device/pretend.h"

#include <chrono>
#include <cstring>
#include <utility>

#include "common/errors.h"
#include "common/memory.h"

namespace bagua {

struct PretendDevice::Worker {
  explicit Worker(int work_us) : thread([this, work_us] { work(work_us); }) {}
  ~Worker() {
    give(nullptr);
    thread.join();
  }
  void give(std::function<void()> piece) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      queue.push_back(std::move(piece));
    }
    changed.notify_one();
  }
  void work(int work_us) {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return !queue.empty(); });
      const std::function<void()> piece = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      if (!piece) return;
      std::this_thread::sleep_for(std::chrono::microseconds(work_us));
      piece();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  std::thread thread;  // last: starts when everything else is there
};

struct PretendDevice::Reached {
  void set() {
    std::lock_guard<std::mutex> lock(mutex);
    is_set = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_set; });
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool is_set = false;
};

PretendDevice::PretendDevice(int work_us) : work_us_(work_us) {}
PretendDevice::~PretendDevice() = default;

void PretendDevice::run(Stream stream, std::function<void()> work) {
  if (!stream) return work();
  static_cast<Worker*>(stream)->give(std::move(work));
}

Device::Mark PretendDevice::mark(Stream stream) {
  check();
  auto reached = std::make_shared<Reached>();
  run(stream, [reached] { reached->set(); });
  return reached;
}

void PretendDevice::follow(Stream stream, const Mark& mark) {
  if (!mark) return;
  run(stream, [reached = std::static_pointer_cast<Reached>(mark)] { reached->wait(); });
}

void PretendDevice::check() const {
  if (failed_) throw InternalError("the pretended device is broken");
}

bool PretendDevice::reached(const Mark& mark) {
  check();
  if (!mark) return true;
  auto& reached = *static_cast<Reached*>(mark.get());
  std::lock_guard<std::mutex> lock(reached.mutex);
  return reached.is_set;
}

void PretendDevice::copy(void* to, const void* from, size_t nbytes, Stream stream) {
  run(stream, [=] { std::memcpy(to, from, nbytes); });
}

void PretendDevice::drain(Stream stream) {
  check();
  const Mark here = mark(stream);
  static_cast<Reached*>(here.get())->wait();
}

std::string PretendDevice::identity() const {
  std::string bytes(16, '\0');
  const auto* me = this;
  std::memcpy(bytes.data(), &me, sizeof me);
  return bytes;
}

std::shared_ptr<char> PretendDevice::allocate(size_t nbytes) {
  auto memory = allocate_lines(nbytes);
  std::memset(memory.get(), 0x5a, nbytes);  // nobody may count on anything
  return memory;
}

void PretendDevice::clear(char* memory, size_t nbytes, Stream stream) {
  run(stream, [=] { std::memset(memory, 0, nbytes); });
}

Device::Stream PretendDevice::add_stream() {
  std::lock_guard<std::mutex> lock(mutex_);
  workers_.push_back(std::make_unique<Worker>(work_us_));
  return workers_.back().get();
}

std::shared_ptr<char> PretendDevice::pin(std::shared_ptr<char> memory, size_t) { return memory; }

}  // namespace bagua
