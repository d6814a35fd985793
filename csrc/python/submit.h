// The call that starts an operation.
#pragma once

#include "python/objects.h"

namespace bagua {

void add_submit(py::module_& m);

}  // namespace bagua
