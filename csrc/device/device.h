// What an accelerator does for the engine. Work is given to streams, each of which does it in order
// while the host goes on; a mark tells where a stream was.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/spare.h"

namespace bagua {

struct NcclLibrary;

constexpr int kHost = -1;  // the number of no device

class Device {
 public:
  using Stream = void*;  // as frameworks hand it around; null is the default one
  using Mark = std::shared_ptr<void>;

  virtual ~Device() = default;
  virtual std::string name() const = 0;
  virtual int number() const = 0;
  // 16 bytes that no other device has.
  virtual std::string identity() const = 0;

  // Any thread may call these, whatever device is its own.
  virtual Mark mark(Stream stream) = 0;
  // What the stream is given from now on waits for the mark. The host does not, unless it is the
  // stream itself.
  virtual void follow(Stream stream, const Mark& mark) = 0;
  virtual bool reached(const Mark& mark) = 0;
  // Whether the stream's work was being captured in a graph there, which will do it whenever its
  // owner likes: such a mark counts as never reached.
  virtual bool captured(const Mark& mark) const = 0;
  // Between the host and the device, either way. Returns at once if the host's memory is pinned.
  virtual void copy(void* to, const void* from, size_t nbytes, Stream stream) = 0;
  // Waits until the stream has nothing to do.
  virtual void drain(Stream stream) = 0;
  // The same for no longer than seconds, since what it follows may never end: false then. A device
  // that is broken has nothing to do any more.
  bool drains_in_time(Stream stream) noexcept;
  // Waits until no stream has anything to do.
  virtual void drain_all() = 0;

  // Keeps an owner of memory until the mark is reached, and lets go of some whose marks are: it
  // looks at a few, other ones each time, however many there are.
  void keep_until(const Mark& mark, std::shared_ptr<void> owner);
  void let_go();

  // Memory of the device. Letting go of it may wait for all that the device does.
  virtual std::shared_ptr<char> allocate(size_t nbytes) = 0;
  // The same for the engine itself, which lets go of it when nothing is done with it any more: it
  // is kept for the next time, without waiting. Where there is no room what is kept makes some,
  // and that may wait for all that the device does.
  std::shared_ptr<char> lend(size_t nbytes);
  // The same, but null where it would have to make room.
  std::shared_ptr<char> lend_at_once(size_t nbytes);
  // Of so many there are, at least.
  static size_t lent_nbytes(size_t nbytes);
  // What is lent, for somebody whose stream may still use it when it is let go of.
  using User = std::shared_ptr<std::atomic<Stream>>;
  std::shared_ptr<char> lent_to(User user, std::shared_ptr<char> memory);
  virtual void clear(char* memory, size_t nbytes, Stream stream) = 0;
  // NCCL for this kind of device, see find_nccl; null, and why, if there is none.
  virtual const NcclLibrary* nccl(const std::string& path, std::string& why_not) = 0;
  // One that lasts as long as the process, and whose work goes first.
  virtual Stream add_stream() = 0;
  // Whether it runs the kernels that were compiled for it, or is too old.
  virtual bool runs_kernels() const { return true; }
  // Kernels that are started meanwhile run on this device, whose context is the calling thread's.
  virtual void as_current(const std::function<void()>& work) = 0;
  // A device that is this host does a kernel's work itself, on the stream; others return false.
  virtual bool works_on_host(Stream, const std::function<void()>&) { return false; }
  // The same memory, which the device can reach by itself until this is let go; null if it cannot.
  virtual std::shared_ptr<char> pin(std::shared_ptr<char> memory, size_t nbytes) = 0;

 protected:
  // A device that goes lets go of everything first: who has lent memory may ask it something.
  void forget_kept();
  // A forked child has the device's objects, whose locks another thread of the parent's may have
  // held: it lets go of nothing.
  bool is_childs() const { return ::getpid() != process_; }

 private:
  struct KeptUntil {
    Mark mark;
    std::shared_ptr<void> owner;
  };
  std::shared_ptr<char> borrowed(Spare::Piece piece);

  const pid_t process_ = ::getpid();
  std::mutex lending_;
  Spare spare_;
  std::mutex keeping_;
  std::vector<KeptUntil> kept_, captured_;  // the latter for ever: such marks are never reached
  size_t next_ = 0;                         // of those kept, to be looked at
};

// The device of this number. Throws a UsageError that says what to do where there is none.
Device& find_device(int number);
// The version this was built with, or "not built".
std::string cuda_compiled();
// What there is here: GPUs, or "no cuda device: <why>". It wakes up the driver.
std::string cuda_devices();
// Whether a driver is installed, which this does not wake up.
bool has_cuda_driver();

}  // namespace bagua
