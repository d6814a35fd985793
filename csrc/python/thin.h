// Thin matrices, seen from Python.
#pragma once

#include <pybind11/pybind11.h>

namespace bagua {

void add_thin(pybind11::module_& m);

}  // namespace bagua
