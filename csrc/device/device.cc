#include "device/device.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "common/clock.h"
#include "common/errors.h"

namespace bagua {
namespace {

void leak(std::shared_ptr<void> owner) { new std::shared_ptr<void>(std::move(owner)); }

}  // namespace

bool Device::drains_in_time(Stream stream) noexcept {
  constexpr double kSeconds = 2;
  try {
    const Mark last = mark(stream);
    for (const double late_s = now_s() + kSeconds; !reached(last) && now_s() < late_s;)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return reached(last);
  } catch (const std::exception&) {  // it is broken
    return true;
  }
}

void Device::keep_until(const Mark& mark, std::shared_ptr<void> owner) {
  if (is_childs()) return leak(std::move(owner));
  {
    std::lock_guard<std::mutex> lock(keeping_);
    (captured(mark) ? captured_ : kept_).push_back({mark, std::move(owner)});
  }
  let_go();
}

// Sizes that are lent, four to a power of two: what is needed varies from time to time.
size_t Device::lent_nbytes(size_t nbytes) {
  size_t step = 256;
  while (nbytes / step >= 8) step *= 2;
  return std::max<size_t>(1, (nbytes + step - 1) / step) * step;
}

std::shared_ptr<char> Device::borrowed(Spare::Piece piece) {
  char* data = piece.memory.get();
  return {data, [this, piece = std::move(piece)](char*) mutable {
            if (is_childs()) return leak(std::move(piece.memory));
            std::lock_guard<std::mutex> lock(lending_);
            spare_.put(std::move(piece));
          }};
}

std::shared_ptr<char> Device::lend_at_once(size_t nbytes) {
  nbytes = lent_nbytes(nbytes);
  Spare::Piece spare;
  {
    std::lock_guard<std::mutex> lock(lending_);
    spare = spare_.take(nbytes);
  }
  if (spare.memory) return borrowed(std::move(spare));
  try {
    return borrowed({nbytes, allocate(nbytes)});
  } catch (const UsageError&) {  // there is no room
    return nullptr;
  }
}

// Where there is no room, what nobody has borrowed makes some.
std::shared_ptr<char> Device::lend(size_t nbytes) {
  if (auto memory = lend_at_once(nbytes)) return memory;
  {
    Spare spare;  // outlives the lock
    const std::lock_guard<std::mutex> lock(lending_);
    std::swap(spare, spare_);
  }
  nbytes = lent_nbytes(nbytes);
  return borrowed({nbytes, allocate(nbytes)});
}

std::shared_ptr<char> Device::lent_to(User user, std::shared_ptr<char> memory) {
  char* data = memory.get();
  return {data, [this, memory = std::move(memory), user = std::move(user)](char*) mutable {
            if (is_childs()) return leak(std::move(memory));
            try {
              keep_until(mark(*user), memory);
            } catch (const Error&) {  // it is broken, or the process ends
              leak(std::move(memory));
            }
          }};
}

void Device::let_go() {
  constexpr size_t kLooks = 8;  // in vain
  std::vector<KeptUntil> done;  // outlives the lock
  const std::lock_guard<std::mutex> lock(keeping_);
  for (size_t in_vain = 0; in_vain < std::min(kLooks, kept_.size());) {
    if (next_ >= kept_.size()) next_ = 0;
    KeptUntil& one = kept_[next_];
    try {
      if (!reached(one.mark)) {
        ++next_;
        ++in_vain;
        continue;
      }
    } catch (const Error&) {
      return;  // it is broken: nobody can say what it still writes to
    }
    done.push_back(std::move(one));
    one = std::move(kept_.back());
    kept_.pop_back();
  }
}

void Device::forget_kept() {
  std::vector<KeptUntil> kept;  // outlives the lock
  const std::lock_guard<std::mutex> lock(keeping_);
  kept.swap(kept_);
  for (KeptUntil& one : captured_) kept.push_back(std::move(one));
  captured_.clear();
}

}  // namespace bagua
