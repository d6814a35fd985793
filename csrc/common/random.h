// Numbers that nobody can guess.
#pragma once

#include <sys/random.h>

#include <cstddef>

#include "common/errors.h"

namespace bagua {

inline void fill_randomly(void* memory, size_t nbytes) {
  if (::getrandom(memory, nbytes, 0) != static_cast<ssize_t>(nbytes))
    throw InternalError("the system gives no random numbers (getrandom)");
}

}  // namespace bagua
