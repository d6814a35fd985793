#include "engine/loans.h"

#include "common/memory.h"

namespace bagua {

// What is too small goes in exchange: sizes may grow and grow.
char* Loans::borrow(size_t nbytes, Device::Stream on) {
  nbytes = Device::lent_nbytes(nbytes);
  const bool is_ours = on == stream_;
  Spare::Piece loan = is_ours ? returned_.take(nbytes) : Spare::Piece{};
  if (!loan.memory) {
    loan = {nbytes, lend(nbytes, on)};
    Spare::Piece smaller = is_ours ? returned_.take_smaller(nbytes) : Spare::Piece{};
    if (smaller.memory) device_->keep_until(last_, std::move(smaller.memory));
  }
  borrowed_.push_back(std::move(loan));
  return borrowed_.back().memory.get();
}

// To make room is to wait for all that the device does, which may wait for a rank that is gone: who
// waits for it here hears of that.
std::shared_ptr<char> Loans::lend(size_t nbytes, Device::Stream on) {
  if (auto memory = device_->lend_at_once(nbytes)) return memory;
  const Device::Mark given = on == stream_ ? device_->mark(stream_) : last_;
  wait_until_([&] { return device_->reached(given); });
  returned_ = {};
  return device_->lend(nbytes);
}

void Loans::end(const Device::Mark& mark, Device::Stream on) {
  if (on == stream_) {
    last_ = mark;
    for (Spare::Piece& loan : borrowed_) returned_.put(std::move(loan));
  } else {
    for (Spare::Piece& loan : borrowed_) device_->keep_until(mark, std::move(loan.memory));
  }
  borrowed_.clear();
}

void Loans::keep_for_ever() {
  bagua::keep_for_ever(std::make_shared<std::vector<Spare::Piece>>(std::move(borrowed_)));
  bagua::keep_for_ever(std::make_shared<Spare>(std::move(returned_)));
}

}  // namespace bagua
