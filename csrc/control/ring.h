// A stream of bytes from one process to another through memory they share. One thread at a time
// writes, one reads; neither ever waits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace bagua {

class Ring {
  struct Shared {
    alignas(64) std::atomic<uint64_t> written{0};
    std::atomic<uint32_t> writer_waits{0};
    alignas(64) std::atomic<uint64_t> read{0};
    std::atomic<uint32_t> reader_sleeps{0};
    alignas(64) char data[60 << 10];
  };

 public:
  static constexpr size_t kNbytes = sizeof(Shared);

  Ring() = default;  // none
  // Memory of kNbytes on a cache line, zeros before the first end is made.
  explicit Ring(char* memory) : shared_(reinterpret_cast<Shared*>(memory)) {}
  bool there() const { return shared_ != nullptr; }

  // ---- the writer's end ------------------------------------------------------------------------

  // Takes as much as there is room for.
  size_t write(const char* data, size_t nbytes) {
    const uint64_t at = shared_->written.load(std::memory_order_relaxed);
    // More than there is only where the reader has ended, and its memory is something else's.
    const uint64_t taken = at - shared_->read.load(std::memory_order_seq_cst);
    nbytes = std::min(nbytes, static_cast<size_t>(kRoom - std::min<uint64_t>(taken, kRoom)));
    const size_t first = std::min(nbytes, kRoom - at % kRoom);
    std::memcpy(shared_->data + at % kRoom, data, first);
    std::memcpy(shared_->data, data + first, nbytes - first);
    shared_->written.store(at + nbytes, std::memory_order_seq_cst);
    return nbytes;
  }
  // Wants to hear when there is room again. Try once more after this.
  void wait_for_room() { shared_->writer_waits.store(1, std::memory_order_seq_cst); }
  // After a write: whether the reader has to be woken. Either this sees that it sleeps, or it saw
  // what was written.
  bool must_wake_reader() {
    return shared_->reader_sleeps.load(std::memory_order_seq_cst) != 0 &&
           shared_->reader_sleeps.exchange(0) != 0;
  }

  // ---- the reader's end ------------------------------------------------------------------------

  bool empty() const {
    return shared_->written.load(std::memory_order_seq_cst) ==
           shared_->read.load(std::memory_order_relaxed);
  }
  // Appends what there is.
  void read(std::string& to) {
    const uint64_t at = shared_->read.load(std::memory_order_relaxed);
    const auto nbytes = static_cast<size_t>(shared_->written.load(std::memory_order_acquire) - at);
    const size_t first = std::min(nbytes, kRoom - at % kRoom);
    to.append(shared_->data + at % kRoom, first);
    to.append(shared_->data, nbytes - first);
    shared_->read.store(at + nbytes, std::memory_order_seq_cst);
  }
  // After a read.
  bool must_wake_writer() {
    return shared_->writer_waits.load(std::memory_order_seq_cst) != 0 &&
           shared_->writer_waits.exchange(0) != 0;
  }
  // From now on the writer has to wake it. Look once more after this.
  void sleeps(bool sleeps) {
    shared_->reader_sleeps.store(sleeps ? 1 : 0, std::memory_order_seq_cst);
  }

 private:
  static constexpr size_t kRoom = sizeof(Shared::data);
  static_assert(std::atomic<uint64_t>::is_always_lock_free, "must work between processes");

  Shared* shared_ = nullptr;
};

}  // namespace bagua
