// How much memory this process may have. The kernel hands out shared memory that it has not got, or
// that a container may not have, and ends whoever then writes to it: so this has to be asked
// before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace bagua {

// What a control group allows the processes in it.
struct GroupLimit {
  std::string file;  // where it is set
  uint64_t nbytes = 0;
  uint64_t used_nbytes = 0;  // less what the kernel drops before it runs out: caches of files
  uint64_t swap_nbytes = UINT64_MAX;  // what may be swapped out besides, if the machine can
  uint64_t left() const { return nbytes > used_nbytes ? nbytes - used_nbytes : 0; }
};

// The limit of this process's groups that leaves least, version 1 or 2, if there is one. `root` is
// put before the paths of /proc and /sys.
std::optional<GroupLimit> group_limit(const std::string& root = "");

// Throws a UsageError, which names the limit, if so many bytes can never be had.
void refuse_beyond_limits(size_t nbytes, const std::string& root = "");

}  // namespace bagua
