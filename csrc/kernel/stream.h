// Copying through the caches, and past them.
#pragma once

#include <cstddef>

#include "common/scaled.h"
#include "kernel/isa.h"

namespace bagua {

// A memcpy. Some C libraries leave middle sizes to `rep movsb`, over which some processors take 25
// times as long if the two places lie unfavourably in their pages: 2 GB/s instead of 60 on Zen 3
// with glibc 2.36.
void plain_copy(void* to, const void* from, size_t nbytes, Isa isa = best_isa());

// For results larger than the caches, which nobody here reads soon: an ordinary store would first
// fetch the line it overwrites. Others may see the bytes late: call stream_fence before telling
// them. No overlap.
void stream_copy(void* to, const void* from, size_t nbytes, Isa isa = best_isa());
void stream_fence();

// Results of so many bytes do not stay in the caches anyway.
constexpr size_t kStreamNbytes = scaled(8 << 20);

}  // namespace bagua
