#include "engine/loans.h"

#include <iterator>

#include "common/memory.h"

namespace bagua {

// What is too small goes in exchange: sizes may grow and grow.
char* Loans::borrow(size_t nbytes, Device::Stream on) {
  nbytes = Device::lent_nbytes(nbytes);
  if (on != stream_) {
    borrowed_.push_back({nbytes, lend(nbytes, on)});
    return borrowed_.back().second.get();
  }
  const auto fits = returned_.lower_bound(nbytes);
  if (fits != returned_.end() && fits->first <= 2 * nbytes) {
    borrowed_.push_back({fits->first, std::move(fits->second)});
    returned_.erase(fits);
  } else {
    borrowed_.push_back({nbytes, lend(nbytes, on)});
    const auto larger = returned_.lower_bound(nbytes);
    if (larger != returned_.begin()) {
      const auto smaller = std::prev(larger);
      device_->keep_until(last_, std::move(smaller->second));
      returned_.erase(smaller);
    }
  }
  return borrowed_.back().second.get();
}

// To make room is to wait for all that the device does, which may wait for a rank that is gone: who
// waits for it here hears of that.
std::shared_ptr<char> Loans::lend(size_t nbytes, Device::Stream on) {
  if (auto memory = device_->lend_at_once(nbytes)) return memory;
  const Device::Mark given = on == stream_ ? device_->mark(stream_) : last_;
  wait_until_([&] { return device_->reached(given); });
  returned_.clear();
  return device_->lend(nbytes);
}

void Loans::end(const Device::Mark& mark, Device::Stream on) {
  if (on == stream_) {
    last_ = mark;
    for (Loan& loan : borrowed_) returned_.insert(std::move(loan));
  } else {
    for (Loan& loan : borrowed_) device_->keep_until(mark, std::move(loan.second));
  }
  borrowed_.clear();
}

void Loans::keep_for_ever() {
  for (auto& [nbytes, memory] : borrowed_) bagua::keep_for_ever(std::move(memory));
  for (auto& [nbytes, memory] : returned_) bagua::keep_for_ever(std::move(memory));
}

}  // namespace bagua
