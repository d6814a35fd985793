// Memory of this process alone, on a cache line.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>

#include "common/errors.h"

namespace bagua {

constexpr size_t kLineNbytes = 64;

constexpr size_t whole_lines(size_t nbytes) {
  return (nbytes + kLineNbytes - 1) / kLineNbytes * kLineNbytes;
}

// Never null, not cleared.
inline std::shared_ptr<char> allocate_lines(size_t nbytes) {
  char* memory =
      static_cast<char*>(std::aligned_alloc(kLineNbytes, whole_lines(nbytes ? nbytes : 1)));
  if (!memory)
    throw UsageError("cannot allocate " + std::to_string(nbytes) +
                     " bytes: there is no more memory, or no more is allowed (see ulimit -v)");
  return std::shared_ptr<char>(memory, std::free);
}

}  // namespace bagua
