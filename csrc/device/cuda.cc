// NVIDIA's GPUs, by the CUDA runtime, which is linked statically and finds the driver by itself.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "common/errors.h"
#include "device/device.h"
#include "device/nccl_library.h"

namespace bagua {
namespace {

constexpr int kOldestMajor = 8;  // of the architectures in cmake/cuda.cmake

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the next call must not find it
  throw InternalError(std::string(what) + ": " + cudaGetErrorString(status));
}

// While it lasts, a capture elsewhere is none of the calling thread's business.
class NoCapture {
 public:
  NoCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~NoCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Makes a device the calling thread's for a while, with its context: a thread without any calls the
// first device its own, and NCCL asks the driver, which knows of no device then.
class Current {
 public:
  explicit Current(int number) {
    thread_local int has_context_of = kHost;
    check(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != number;
    if (!changed_ && has_context_of == number) return;
    check(cudaSetDevice(number), "cudaSetDevice");
    has_context_of = number;
  }
  // Going back to a device that nobody uses would take some of its memory.
  ~Current() {
    if (changed_ && in_use(before_)) cudaSetDevice(before_);
  }

 private:
  static bool in_use(int number) {
    using GetState = int (*)(int, unsigned*, int*);
    static const auto get_state = reinterpret_cast<GetState>(driver("cuDevicePrimaryCtxGetState"));
    unsigned flags = 0;
    int active = 1;
    return !get_state || get_state(number, &flags, &active) != 0 || active;
  }
  static void* driver(const char* symbol) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const auto status =
        cudaGetDriverEntryPointByVersion(symbol, &function, 12000, cudaEnableDefault, &found);
#else
    const auto status = cudaGetDriverEntryPoint(symbol, &function, cudaEnableDefault, &found);
#endif
    return status == cudaSuccess ? function : nullptr;
  }

  const NoCapture no_capture_;
  int before_ = 0;
  bool changed_ = false;
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int number) : number_(number) {
    cudaDeviceProp about;
    const cudaError_t status = cudaGetDeviceProperties(&about, number);
    if (status == cudaErrorInsufficientDriver)
      throw UsageError("the driver is too old for CUDA " + cuda_compiled() +
                       ", which bagua was built with: update it, or install bagua again with the "
                       "nvcc of an older toolkit in CUDA_HOME");
    check(status, "cudaGetDeviceProperties");
    identity_.assign(about.uuid.bytes, sizeof about.uuid.bytes);
    runs_kernels_ = about.major >= kOldestMajor;
    name_ = "GPU " + std::to_string(number) + " (" + about.name + ")";
  }
  std::string name() const override { return name_; }
  int number() const override { return number_; }
  std::string identity() const override { return identity_; }

  Mark mark(Stream stream) override {
    const Current current(number_);
    std::shared_ptr<Event> event(take_event(), [this](Event* e) { give_back(e); });
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing");
    event->captured = status == cudaStreamCaptureStatusActive;
    check(cudaEventRecord(event->event, as_stream(stream)), "cudaEventRecord");
    return event;
  }
  void follow(Stream stream, const Mark& mark) override {
    if (!mark) return;
    const Current current(number_);
    check(cudaStreamWaitEvent(as_stream(stream), as_event(mark).event, 0), "cudaStreamWaitEvent");
  }
  bool reached(const Mark& mark) override {
    if (!mark) return true;
    if (captured(mark)) return false;
    const Current current(number_);
    const cudaError_t status = cudaEventQuery(as_event(mark).event);
    if (status == cudaErrorNotReady) return cudaGetLastError(), false;
    check(status, "cudaEventQuery");
    return true;
  }
  bool captured(const Mark& mark) const override { return mark && as_event(mark).captured; }
  void copy(void* to, const void* from, size_t nbytes, Stream stream) override {
    const Current current(number_);
    check(cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDefault, as_stream(stream)),
          "cudaMemcpyAsync");
  }
  void drain(Stream stream) override {
    const Current current(number_);
    check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
  }
  void drain_all() override {
    const Current current(number_);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  std::shared_ptr<char> allocate(size_t nbytes) override {
    const Current current(number_);
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, nbytes ? nbytes : 1);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw UsageError(name_ + " has no " + std::to_string(nbytes) +
                       " bytes left for an exchange; what torch keeps for itself it gives back by "
                       "torch.cuda.empty_cache(), and PYTORCH_NO_CUDA_MEMORY_CACHING=1 keeps "
                       "nothing");
    }
    check(status, "cudaMalloc");
    return {static_cast<char*>(memory), [number = number_](char* p) {
              try {
                const Current current(number);
                check(cudaFree(p), "cudaFree");
              } catch (const Error&) {  // the device is broken, or the process ends
              }
            }};
  }
  void clear(char* memory, size_t nbytes, Stream stream) override {
    const Current current(number_);
    check(cudaMemsetAsync(memory, 0, nbytes, as_stream(stream)), "cudaMemsetAsync");
  }

  Stream add_stream() override {
    const Current current(number_);
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
          "cudaStreamCreateWithPriority");
    return stream;
  }

  const NcclLibrary* nccl(const std::string& path, std::string& why_not) override {
    return find_nccl(path, why_not);
  }

  bool runs_kernels() const override { return runs_kernels_; }
  void as_current(const std::function<void()>& work) override {
    const Current current(number_);
    cudaGetLastError();  // of others
    work();
    check(cudaGetLastError(), "a kernel");
  }

  std::shared_ptr<char> pin(std::shared_ptr<char> memory, size_t nbytes) override {
    const Current current(number_);
    char* data = memory.get();
    if (cudaHostRegister(data, nbytes, cudaHostRegisterPortable) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    return {data, [memory = std::move(memory), number = number_](char* p) {
              try {
                const Current current(number);
                check(cudaHostUnregister(p), "cudaHostUnregister");
              } catch (const Error&) {  // as above
              }
            }};
  }

 private:
  struct Event {
    cudaEvent_t event = nullptr;
    bool captured = false;
  };
  static cudaStream_t as_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }
  static const Event& as_event(const Mark& mark) { return *static_cast<Event*>(mark.get()); }

  Event* take_event() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!events_.empty()) {
        Event* const event = events_.back();
        events_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return new Event{event};
  }
  void give_back(Event* event) {
    if (is_childs()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(event);
  }

  const int number_;
  std::string name_, identity_;
  bool runs_kernels_ = false;
  std::mutex mutex_;
  std::vector<Event*> events_;  // that nobody waits for
};

}  // namespace

Device& find_device(int number) {
  static auto* mutex = new std::mutex;
  static auto* devices = new std::map<int, CudaDevice*>;  // outlive whatever has their marks
  std::lock_guard<std::mutex> lock(*mutex);
  CudaDevice*& device = (*devices)[number];
  if (!device) device = new CudaDevice(number);
  return *device;
}

std::string cuda_compiled() {
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

std::string cuda_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    cudaGetLastError();
    return std::string("no cuda device") +
           (status == cudaSuccess ? "" : std::string(": ") + cudaGetErrorString(status));
  }
  return std::to_string(count) + " x " + find_device(0).name();
}

bool has_cuda_driver() {
  void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver) ::dlclose(driver);
  return driver != nullptr;
}

}  // namespace bagua
