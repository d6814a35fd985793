// Memory of a device for one exchange after the other, of which many may be under way: those of our
// stream use the same, for what is given to a stream is done in order.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "device/device.h"
#include "device/spare.h"
#include "transport/nccl.h"

namespace bagua {

class Loans {
 public:
  Loans(Device* device, Device::Stream stream, NcclGroup::WaitUntil wait_until)
      : device_(device), stream_(stream), wait_until_(std::move(wait_until)) {}

  // For the exchange at hand, which is on some stream. On others than ours, as that of a graph that
  // captures it, memory is its own.
  char* borrow(size_t nbytes, Device::Stream on);
  // Memory that the exchange at hand gives to somebody.
  std::shared_ptr<char> lend(size_t nbytes, Device::Stream on);
  // The exchange at hand has been given, and is done when the mark is reached.
  void end(const Device::Mark& mark, Device::Stream on);
  // What is under way may never end.
  void keep_for_ever();

 private:
  Device* const device_;
  const Device::Stream stream_;
  const NcclGroup::WaitUntil wait_until_;
  std::vector<Spare::Piece> borrowed_;  // by the exchange at hand
  Spare returned_;
  Device::Mark last_;  // where the last of those that gave these back is done
};

}  // namespace bagua
