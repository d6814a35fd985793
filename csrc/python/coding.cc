#include "python/coding.h"

#include <pybind11/stl.h>

#include "common/errors.h"
#include "python/objects.h"
#include "python/plain.h"

namespace bagua {
namespace {

Isa isa_named(const std::string& name) {
  for (int i = 0; i < kIsaCount; ++i)
    if (name == isa_name(static_cast<Isa>(i)) && has_isa(static_cast<Isa>(i)))
      return static_cast<Isa>(i);
  if (name.empty()) return best_isa();
  throw UsageError("this processor has no instruction set " + name);
}

Plain plain_of(const py::object& array, DType dtype, int64_t count) {
  Plain plain;
  if (!read_plain(array.ptr(), plain) || plain.device != kHost || plain.dtype != dtype ||
      plain.count() < count)
    throw UsageError("a codec needs writable arrays in C order: float32 values, uint8 bytes");
  return plain;
}

}  // namespace

void add_coding_type(py::module_& m) {
  py::class_<Coding>(m, "Coding")
      .def(py::init([](const std::string& codec, int kept, const std::string& values) {
             return parse_coding(codec + ":" + std::to_string(kept) + ":" + values);
           }),
           py::arg("codec"), py::arg("kept") = 41, py::arg("values") = "raw")
      .def_property_readonly("block", &Coding::block)
      .def("wire_nbytes", &Coding::wire_nbytes)
      .def(
          "encode",
          [](const Coding& c, const py::object& values, const py::object& wire,
             const std::string& isa) {
            const Plain from = plain_of(values, DType::kF32, 0);
            const Plain to = plain_of(wire, DType::kU8, c.wire_nbytes(from.count()));
            c.encode(reinterpret_cast<const float*>(from.data), from.count(), to.data,
                     isa_named(isa));
          },
          py::arg("values"), py::arg("wire"), py::arg("isa") = "")
      .def(
          "decode",
          [](const Coding& c, const py::object& wire, const py::object& values,
             const std::string& isa) {
            const Plain to = plain_of(values, DType::kF32, 0);
            const Plain from = plain_of(wire, DType::kU8, c.wire_nbytes(to.count()));
            c.decode(from.data, to.count(), reinterpret_cast<float*>(to.data), isa_named(isa));
          },
          py::arg("wire"), py::arg("values"), py::arg("isa") = "");
  m.def("isas", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kIsaCount; ++i)
      if (has_isa(static_cast<Isa>(i))) names.push_back(isa_name(static_cast<Isa>(i)));
    return py::cast(names);
  });
}

}  // namespace bagua
