#include "device/device.h"

#include <utility>

#include "common/errors.h"

namespace bagua {

void Device::keep_until(const Mark& mark, std::shared_ptr<void> owner) {
  {
    std::lock_guard<std::mutex> lock(keeping_);
    kept_.push_back({mark, std::move(owner)});
  }
  let_go();
}

std::shared_ptr<char> Device::lend(size_t nbytes) {
  std::shared_ptr<char> memory;
  size_t has_nbytes = nbytes;
  {
    std::lock_guard<std::mutex> lock(lending_);
    const auto found = spare_.lower_bound(nbytes);
    if (found != spare_.end() && found->first <= 2 * nbytes) {
      has_nbytes = found->first;
      memory = std::move(found->second);
      spare_.erase(found);
    }
  }
  if (!memory) memory = allocate(nbytes);
  char* data = memory.get();
  return {data, [this, memory = std::move(memory), has_nbytes](char*) mutable {
            std::lock_guard<std::mutex> lock(lending_);
            spare_.emplace(has_nbytes, std::move(memory));
          }};
}

void Device::let_go() {
  std::vector<KeptUntil> done;  // outlives the lock
  const std::lock_guard<std::mutex> lock(keeping_);
  for (size_t i = 0; i < kept_.size();) {
    bool reached = false;
    try {
      reached = this->reached(kept_[i].mark);
    } catch (const Error&) {
      return;  // it is broken: nobody can say what it still writes to
    }
    if (reached) {
      done.push_back(std::move(kept_[i]));
      kept_[i] = std::move(kept_.back());
      kept_.pop_back();
    } else {
      ++i;
    }
  }
}

}  // namespace bagua
