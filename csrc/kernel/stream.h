// Copying past the caches: for results larger than them, which nobody here reads soon. An ordinary
// store would first fetch the line it overwrites.
#pragma once

#include <cstddef>

#include "kernel/isa.h"

namespace bagua {

// Others may see the bytes late: call stream_fence before telling them. No overlap.
void stream_copy(void* to, const void* from, size_t nbytes, Isa isa = best_isa());
void stream_fence();

}  // namespace bagua
