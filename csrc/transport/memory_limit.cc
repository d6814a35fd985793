#include "transport/memory_limit.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <fstream>

#include "common/errors.h"

namespace bagua {
namespace {

// Of a file with one number; 0 if there is none, as in "max".
uint64_t number_in(const std::string& file) {
  uint64_t number = 0;
  std::ifstream(file) >> number;
  return number;
}

// What the kernel drops when memory runs short. Version 1 does not say how much that is of its own
// memory, so all of that is taken for it: an error must not be a false one.
uint64_t dropped(const std::string& group, bool v2) {
  uint64_t sum = v2 ? 0 : number_in(group + "/memory.kmem.usage_in_bytes");
  std::ifstream lines(group + "/memory.stat");
  uint64_t nbytes = 0;
  for (std::string name; lines >> name >> nbytes;)
    if (v2 ? name == "inactive_file" || name == "active_file" || name == "slab_reclaimable"
           : name == "total_inactive_file" || name == "total_active_file")
      sum += nbytes;
  return sum;
}

// Version 1 limits memory and swap together.
uint64_t swap_left(const std::string& group, bool v2) {
  const std::string prefix = group + (v2 ? "/memory.swap." : "/memory.memsw.");
  uint64_t most = 0;
  if (!(std::ifstream(prefix + (v2 ? "max" : "limit_in_bytes")) >> most)) return UINT64_MAX;
  const uint64_t used = number_in(prefix + (v2 ? "current" : "usage_in_bytes"));
  const uint64_t left = most - std::min(most, used);
  if (v2) return left;
  const uint64_t memory = number_in(group + "/memory.limit_in_bytes");
  const uint64_t memory_used = number_in(group + "/memory.usage_in_bytes");
  return left - std::min(left, memory - std::min(memory, memory_used));
}

void look_at(const std::string& group, bool v2, std::optional<GroupLimit>& least) {
  GroupLimit limit;
  limit.file = group + (v2 ? "/memory.max" : "/memory.limit_in_bytes");
  limit.nbytes = number_in(limit.file);
  if (limit.nbytes == 0) return;
  const uint64_t used = number_in(group + (v2 ? "/memory.current" : "/memory.usage_in_bytes"));
  limit.used_nbytes = used - std::min(used, dropped(group, v2));
  limit.swap_nbytes = swap_left(group, v2);
  if (!least || limit.left() < least->left()) least = limit;
}

}  // namespace

std::optional<GroupLimit> group_limit(const std::string& root) {
  std::optional<GroupLimit> least;
  std::ifstream lines(root + "/proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    // "number:controllers:path"; there are no controllers in version 2.
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",memory,") == std::string::npos) continue;
    // The groups above set limits, too. In a container what is mounted begins at its own group,
    // whatever the path.
    std::string path = line.substr(second + 1);
    do {
      path.resize(path.find_last_not_of('/') + 1);
      look_at(root + (v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory") + path, v2, least);
      path.resize(path.find_last_of('/') + 1);
    } while (!path.empty());
  }
  return least;
}

void refuse_beyond_limits(size_t nbytes, const std::string& root) {
  const std::string wish = "cannot have " + std::to_string(nbytes) + " bytes of shared memory: ";
  struct sysinfo machine{};
  if (::sysinfo(&machine) != 0) return;
  const uint64_t has = (machine.totalram + machine.totalswap) * machine.mem_unit;
  if (nbytes > has) throw UsageError(wish + "all memory of this machine is " + std::to_string(has));
  const std::optional<GroupLimit> limit = group_limit(root);
  if (!limit) return;
  // What can be swapped out makes room.
  const auto swap = std::min<uint64_t>(machine.freeswap * machine.mem_unit, limit->swap_nbytes);
  if (nbytes > limit->left() + swap)
    throw UsageError(wish + limit->file + " allows " + std::to_string(limit->nbytes) + ", " +
                     std::to_string(limit->used_nbytes) +
                     " of them are in use; raise that limit, or run fewer ranks under it");
}

}  // namespace bagua
