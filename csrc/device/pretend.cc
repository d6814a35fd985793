#include "device/pretend.h"

#include <chrono>
#include <cstring>
#include <random>
#include <utility>

#include "common/errors.h"
#include "common/memory.h"

namespace bagua {
namespace {

thread_local int current = 0;  // how often a device is the thread's

// Other processes have devices, too.
std::string drawn_identity() {
  std::random_device drawn;
  std::string bytes(16, '\0');
  for (char& byte : bytes) byte = static_cast<char>(drawn());
  return bytes;
}

}  // namespace

// In the order in which it was given, which is one that every stream's order allows.
class PretendDevice::Graph {
 public:
  void add(std::function<void()> piece) {
    std::lock_guard<std::mutex> lock(mutex_);
    pieces_.push_back(std::move(piece));
  }
  void join(Stream stream, const std::shared_ptr<Graph>& self);

 private:
  friend class PretendDevice;
  std::mutex mutex_;
  std::vector<std::function<void()>> pieces_;
  std::vector<Worker*> workers_;
};

struct PretendDevice::Worker {
  explicit Worker(int work_us) : thread([this, work_us] { work(work_us); }) {}
  ~Worker() {
    give(nullptr);
    thread.join();
  }
  void give(std::function<void()> piece) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (capture) return capture->add(std::move(piece));
      queue.push_back(std::move(piece));
    }
    changed.notify_one();
  }
  static std::shared_ptr<Graph> capture_of(Stream stream);
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
  std::shared_ptr<Graph> capture;  // mutex: what notes its work, if it is captured
  std::thread thread;              // last: starts when everything else is there
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
  std::shared_ptr<Graph> graph;  // where the stream was captured
};

std::shared_ptr<PretendDevice::Graph> PretendDevice::Worker::capture_of(Stream stream) {
  if (!stream) return nullptr;
  Worker& worker = *static_cast<Worker*>(stream);
  std::lock_guard<std::mutex> lock(worker.mutex);
  return worker.capture;
}

void PretendDevice::Graph::join(Stream stream, const std::shared_ptr<Graph>& self) {
  Worker& worker = *static_cast<Worker*>(stream);
  std::scoped_lock lock(worker.mutex, mutex_);
  if (worker.capture == self) return;
  worker.capture = self;
  workers_.push_back(&worker);
}

void PretendDevice::end(Graph& graph) {
  for (Worker* worker : graph.workers_) {
    std::lock_guard<std::mutex> lock(worker->mutex);
    worker->capture = nullptr;
  }
}

std::shared_ptr<PretendDevice::Graph> PretendDevice::capture(Stream stream) {
  auto graph = std::make_shared<Graph>();
  graph->join(stream, graph);
  return graph;
}

void PretendDevice::replay(Stream stream, const std::shared_ptr<Graph>& graph) {
  for (const auto& piece : graph->pieces_) run(stream, piece);
}

PretendDevice::PretendDevice(int work_us) : work_us_(work_us), identity_(drawn_identity()) {
  shared_->device = this;
}
PretendDevice::~PretendDevice() {
  forget_kept();
  shared_->device = nullptr;
}

void PretendDevice::run(Stream stream, std::function<void()> work) {
  if (!stream) return work();
  static_cast<Worker*>(stream)->give(std::move(work));
}

Device::Mark PretendDevice::mark(Stream stream) {
  check();
  auto reached = std::make_shared<Reached>();
  reached->graph = Worker::capture_of(stream);
  if (!reached->graph) run(stream, [reached] { reached->set(); });
  return reached;
}

void PretendDevice::follow(Stream stream, const Mark& mark) {
  if (!mark) return;
  const auto reached = std::static_pointer_cast<Reached>(mark);
  if (reached->graph) return reached->graph->join(stream, reached->graph);
  if (Worker::capture_of(stream)) throw InternalError("what is captured waits for nothing else");
  run(stream, [reached] { reached->wait(); });
}

bool PretendDevice::captured(const Mark& mark) const {
  return mark && static_cast<Reached*>(mark.get())->graph;
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
  if (!captured(here)) static_cast<Reached*>(here.get())->wait();
}

void PretendDevice::drain_all() {
  std::vector<Stream> all;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& worker : workers_) all.push_back(worker.get());
  }
  for (const Stream stream : all) drain(stream);
}

void PretendDevice::as_current(const std::function<void()>& work) {
  struct Current {
    Current() { ++current; }
    ~Current() { --current; }
  } here;
  work();
}

bool PretendDevice::is_current() { return current > 0; }

std::shared_ptr<char> PretendDevice::allocate(size_t nbytes) {
  ++allocations_;
  const auto size = static_cast<int64_t>(nbytes);
  if (shared_->left_nbytes.fetch_sub(size) < size) {
    shared_->left_nbytes += size;
    throw UsageError(name() + " has no " + std::to_string(nbytes) + " bytes left");
  }
  auto memory = allocate_lines(nbytes);
  std::memset(memory.get(), 0x5a, nbytes);  // nobody may count on anything
  char* data = memory.get();
  return {data, [shared = shared_, memory = std::move(memory), size](char*) mutable {
            if (PretendDevice* const device = shared->device) device->drain_to_free();
            memory.reset();
            shared->left_nbytes += size;
          }};
}

void PretendDevice::drain_to_free() {
  if (is_childs()) return;
  try {
    drain_all();
  } catch (const Error&) {  // it is broken
  }
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
