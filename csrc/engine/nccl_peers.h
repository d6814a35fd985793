// Allreduce with some peers only, on devices: what `neighbors` does (csrc/collective), by NCCL and
// the kernels of codecs that lose nothing.
#pragma once

#include "engine/nccl_coded.h"

namespace bagua {

// Whether it can be done: a matter of the elements.
bool can_meet_on_device(DType dtype);
// Of floats of 32 or 16 bits, which are rounded once.
void allreduce_with_peers(const OnDevice& on, const Job& job);
// What that is made of: in place. The job's finish, peers and weights count.
void allreduce_with_peers(const OnDevice& on, const Job& job, DType dtype, char* data,
                          int64_t count);

}  // namespace bagua
