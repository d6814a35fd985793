#include "engine/loans.h"

#include <iterator>

#include "common/errors.h"
#include "common/memory.h"

namespace bagua {

char* Loans::borrow(size_t nbytes, bool in_order) {
  nbytes = Device::lent_nbytes(nbytes);
  const auto fits = in_order ? returned_.lower_bound(nbytes) : returned_.end();
  if (fits != returned_.end() && fits->first <= 2 * nbytes) {
    borrowed_.push_back({fits->first, std::move(fits->second)});
    returned_.erase(fits);
  } else {
    borrowed_.push_back({nbytes, lend(nbytes, in_order)});
  }
  return borrowed_.back().second.get();
}

// In exchange for what is too small: sizes may grow and grow.
std::shared_ptr<char> Loans::lend(size_t nbytes, bool in_order) {
  const auto larger = returned_.lower_bound(nbytes);
  if (in_order && larger != returned_.begin()) {
    const auto smaller = std::prev(larger);
    device_->keep_until(last_, std::move(smaller->second));
    returned_.erase(smaller);
  }
  try {
    return device_->lend(nbytes);
  } catch (const UsageError&) {  // there is no room
    if (returned_.empty()) throw;
  }
  wait_until_([&] { return device_->reached(last_); });
  returned_.clear();
  return device_->lend(nbytes);
}

void Loans::end(const Device::Mark& mark, bool in_order) {
  if (in_order) {
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
