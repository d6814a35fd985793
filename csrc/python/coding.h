// Codecs, seen from Python: Coding(codec, kept, values) with wire_nbytes, encode and decode.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "codec/codec.h"

namespace bagua {

void add_coding_type(pybind11::module_& m);

}  // namespace bagua
