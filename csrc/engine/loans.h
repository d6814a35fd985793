// Memory of a device for one exchange after the other, of which many may be under way: those of one
// stream use the same, for what is given to a stream is done in order.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "device/device.h"

namespace bagua {

class Loans {
 public:
  // Returns when what it is given holds; throws when waiting on has become pointless.
  using WaitUntil = std::function<void(const std::function<bool()>&)>;

  Loans(Device* device, WaitUntil wait_until)
      : device_(device), wait_until_(std::move(wait_until)) {}

  // For the exchange at hand. It is `in_order` where what earlier ones gave back was used on its
  // stream; others, as those that a graph captures, get memory of their own.
  char* borrow(size_t nbytes, bool in_order);
  // The exchange at hand has been given, and is done when the mark is reached.
  void end(const Device::Mark& mark, bool in_order);
  // What is under way may never end.
  void keep_for_ever();

 private:
  std::shared_ptr<char> lend(size_t nbytes, bool in_order);

  Device* const device_;
  const WaitUntil wait_until_;
  using Loan = std::pair<size_t, std::shared_ptr<char>>;
  std::vector<Loan> borrowed_;  // by the exchange at hand
  std::multimap<size_t, std::shared_ptr<char>> returned_;
  Device::Mark last_;  // where the last of those that gave these back is done
};

}  // namespace bagua
