// What no rank need be asked about: requests that cannot be carried out, whoever else makes them.
#pragma once

#include <string>
#include <vector>

#include "engine/request.h"

namespace bagua {

// Why a request is refused by itself, or in a process set of these ranks in a world of this size.
// Empty: it is not.
std::string refuse(const Request& request);
std::string refuse_in(const Request& request, const std::vector<int>& ranks, int world_size);

}  // namespace bagua
