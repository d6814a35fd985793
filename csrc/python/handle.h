// The Handle that Python sees.
#pragma once

#include "engine/engine.h"
#include "python/objects.h"

namespace bagua {

void add_handle_type(py::module_& m);

// `result` is what wait() returns, unless Python sets a function `finish(handle)` that makes it.
PyObject* make_handle(std::shared_ptr<Engine> engine, HandlePtr handle, PyObject* result);

}  // namespace bagua
