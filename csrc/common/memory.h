// Memory of this process alone, on a cache line.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

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

// For what somebody may still read or write, and nobody can say how long. Any thread.
inline void keep_for_ever(std::shared_ptr<void> memory) {
  static auto* kept = new std::vector<std::shared_ptr<void>>;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace bagua
