// What autograd calls when a gradient is there.
#pragma once

#include "python/objects.h"

namespace bagua {

void add_notice_type(py::module_& m);

}  // namespace bagua
