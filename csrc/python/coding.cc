#include "python/coding.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "codec/gpu.h"
#include "common/errors.h"
#include "kernel/reduce.h"
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

// Values, and the bytes they are coded in. A residual may be None.
struct Operand {
  Operand(const py::object& array, DType dtype, int64_t count, bool may_be_none = false) {
    if (may_be_none && array.is_none()) return;
    if (!read_plain(array.ptr(), plain) || plain.dtype != dtype || plain.count() < count)
      throw UsageError("a codec needs writable arrays in C order: float32 values, uint8 bytes");
  }
  float* values() const { return reinterpret_cast<float*>(plain.data); }
  Plain plain = {};
};

// The GPU that all are on; null: all are in the host's memory.
Device* device_of_all(std::initializer_list<const Operand*> operands) {
  int number = -2;
  for (const Operand* operand : operands) {
    if (!operand->plain.data) continue;
    if (number >= kHost && operand->plain.device != number)
      throw UsageError("a codec's arrays must all be on one device");
    number = operand->plain.device;
  }
  return number >= 0 ? &device_of(number) : nullptr;
}

void encode(const Coding& c, const py::object& values, const py::object& wire,
            const std::string& isa, const py::object& residual) {
  const Operand from(values, DType::kF32, 0);
  const int64_t count = from.plain.count();
  const Operand to(wire, DType::kU8, c.wire_nbytes(count));
  const Operand lost(residual, DType::kF32, count, true);
  if (Device* device = device_of_all({&from, &to, &lost}))
    return gpu_encode(c, from.values(), lost.values(), count, to.plain.data, *device,
                      current_stream(*device));
  c.encode_rest(from.values(), lost.values(), count, to.plain.data, isa_named(isa));
}

void decode(const Coding& c, const py::object& wire, const py::object& values,
            const std::string& isa) {
  const Operand to(values, DType::kF32, 0);
  const int64_t count = to.plain.count();
  const Operand from(wire, DType::kU8, c.wire_nbytes(count));
  if (Device* device = device_of_all({&from, &to}))
    return gpu_decode(c, from.plain.data, count, to.values(), *device, current_stream(*device));
  c.decode(from.plain.data, count, to.values(), isa_named(isa));
}

Wires at_equal_distances(const std::vector<const char*>& wires) {
  const int64_t stride = wires.size() > 1 ? wires[1] - wires[0] : 0;
  for (size_t i = 1; i < wires.size(); ++i)
    if (wires[i] - wires[i - 1] != stride)
      throw UsageError("on a GPU wires lie at equal distances, as the rows of a tensor do");
  return {wires.empty() ? nullptr : wires[0], stride, static_cast<int>(wires.size())};
}

// Adds up what wires say, in order, and divides the sum by their number: what one rank does for all
// in an allreduce. Without a wire of the result, as a sparse codec goes, that is all.
void average(const Coding& c, const std::vector<py::object>& wires, const py::object& wire,
             const py::object& values, const py::object& residual) {
  const Operand out(values, DType::kF32, 0);
  const int64_t count = out.plain.count();
  const Operand to(wire, DType::kU8, c.wire_nbytes(count), true),
      lost(residual, DType::kF32, count, true);
  const bool is_all = wire.is_none();
  Finish finish;
  finish.divisor = static_cast<double>(wires.size());
  std::vector<const char*> said;
  Device* device = device_of_all({&out, &to, &lost});
  for (const py::object& one : wires) {
    const Operand from(one, DType::kU8, c.wire_nbytes(count));
    device_of_all({&out, &from});
    said.push_back(from.plain.data);
  }
  if (device && is_all)
    return gpu_sum(c, at_equal_distances(said), finish, count, out.values(), *device,
                   current_stream(*device));
  if (device)
    return gpu_add_up(c, at_equal_distances(said), finish, lost.values(), count, to.plain.data,
                      out.values(), *device, current_stream(*device));
  c.add_up(said, finish, count, out.values());
  if (is_all) return;
  c.encode_rest(out.values(), lost.values(), count, to.plain.data);
  c.decode(to.plain.data, count, out.values());
}

// Multiplies floats, and rounds once.
void scale_floats(const py::object& values, double factor) {
  Plain plain = {};
  if (!read_plain(values.ptr(), plain) || !is_float(plain.dtype))
    throw UsageError("writable floats in C order are needed");
  if (plain.device == kHost) return scale(plain.dtype, plain.data, plain.count(), factor);
  Device& device = device_of(plain.device);
  gpu_scale(plain.dtype, plain.data, plain.count(), factor, device, current_stream(device));
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
      .def("encode", encode, py::arg("values"), py::arg("wire"), py::arg("isa") = "",
           py::arg("residual") = py::none())
      .def("decode", decode, py::arg("wire"), py::arg("values"), py::arg("isa") = "")
      .def("average", average, py::arg("wires"), py::arg("wire"), py::arg("values"),
           py::arg("residual") = py::none());
  m.def("scale", scale_floats);
  m.def("isas", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kIsaCount; ++i)
      if (has_isa(static_cast<Isa>(i))) names.push_back(isa_name(static_cast<Isa>(i)));
    return py::cast(names);
  });
}

}  // namespace bagua
