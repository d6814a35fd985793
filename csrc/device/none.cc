// What a build without CUDA has in place of cuda.cc.
#include "common/errors.h"
#include "device/device.h"

namespace bagua {

Device& find_device(int number) {
  throw UsageError("a tensor is on GPU " + std::to_string(number) +
                   ", and bagua was built without CUDA: install it again where nvcc is found, or "
                   "with BAGUA_CUDA=1, whose nvcc from PyPI needs a driver of 580 or newer");
}

std::string cuda_compiled() { return "not built"; }
std::string cuda_devices() { return "not built"; }
bool has_cuda_driver() { return false; }

}  // namespace bagua
