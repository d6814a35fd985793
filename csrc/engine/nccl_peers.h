// Allreduce with some peers only, on devices: what `neighbors` and `mirrored` do (csrc/collective),
// by NCCL and the kernels of codecs. Values are the same, but for the signs of zeros.
#pragma once

#include "engine/nccl_coded.h"

namespace bagua {

// Whether it can be done, through a codec or not: a matter of the elements.
bool can_meet_on_device(DType dtype, bool coded);
// Of floats of 32 or 16 bits, which are rounded once; through a codec of the former.
void allreduce_with_peers(const OnDevice& on, const Job& job);
// What that is made of: in place. The job's finish, peers, weights and codec count.
void allreduce_with_peers(const OnDevice& on, const Job& job, DType dtype, char* data,
                          int64_t count);

}  // namespace bagua
