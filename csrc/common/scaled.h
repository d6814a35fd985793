// Sizes from which on work is done in another way. A sanitizer looks at every access: where one
// does, the same ways are taken with an eighth of the memory.
#pragma once

#include <cstdint>

namespace bagua {

#ifdef BAGUA_SANITIZED
constexpr int64_t scaled(int64_t size) { return size / 8; }
#else
constexpr int64_t scaled(int64_t size) { return size; }
#endif

}  // namespace bagua
