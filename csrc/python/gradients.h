// What is done for all gradients of a bucket at once.
#pragma once

#include "python/objects.h"

namespace bagua {

void add_gradient_functions(py::module_& m);

}  // namespace bagua
