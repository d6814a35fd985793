// Allreduce of floats through a codec, on devices: what `compressed` and `sparse` do
// (csrc/collective), with the codec's kernels, and NCCL for what travels. The bytes are the same.
#pragma once

#include <functional>
#include <string>
#include <vector>

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

// What that is made of. Calls reduce(data, count) with a job's values as floats of 32 bits, where
// it leaves the results.
void in_floats(const OnDevice& on, const Job& job,
               const std::function<void(float*, int64_t)>& reduce);
// Of floats, in place. The job's finish counts, which may be one for more ranks than these.
void allreduce_floats(const OnDevice& on, const Job& job, float* data, int64_t count);
// So many values cut for so many ranks, where wires may begin if there are any.
std::vector<Slice> slices_for(const Coding* coding, int64_t count, int ranks);

}  // namespace bagua
