// Allreduce of floats through a codec, on devices: what `compressed` and `sparse` do
// (csrc/collective), with the codec's kernels, and NCCL for what travels. The bytes are the same.
#pragma once

#include <functional>

#include "collective/collective.h"
#include "device/device.h"
#include "transport/nccl.h"

namespace bagua {

struct OnDevice {
  NcclGroup& nccl;
  Device& device;
  Device::Stream stream;
  int size, me;
  std::function<char*(size_t)> borrow;  // memory of the device, for the exchange at hand
};

// Whether it can be done: a matter of the codec and the elements.
bool can_code_on_device(const std::string& codec, DType dtype);
void allreduce_coded(const OnDevice& on, const Job& job);

}  // namespace bagua
