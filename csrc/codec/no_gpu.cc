// What a build without CUDA has in place of gpu.cc.
#include "codec/gpu.h"
#include "common/errors.h"

namespace bagua {

void gpu_encode(const Coding&, const float*, float*, int64_t, char*, Device&, Device::Stream) {
  throw InternalError("built without CUDA");
}
void gpu_decode(const Coding&, const char*, int64_t, float*, Device&, Device::Stream) {
  throw InternalError("built without CUDA");
}
void gpu_add_up(const Coding&, const char* const*, int, Finish, float*, int64_t, char*, float*,
                Device&, Device::Stream) {
  throw InternalError("built without CUDA");
}

}  // namespace bagua
