// The hot call, so its arguments are read by hand instead of by pybind11's casters.
#include "python/submit.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "codec/codec.h"
#include "engine/engine.h"
#include "python/handle.h"
#include "python/plain.h"
#include "python/written.h"

namespace bagua {
namespace {

// What this thread's requests say of the step that they belong to.
struct StepCounts {
  int32_t earlier = 0, failures = 0;
};
thread_local StepCounts step_counts;

void add_tensor(Request& request, DType dtype, const int64_t* shape, size_t ndim, Part part) {
  Description& d = request.description;
  request.parts.push_back(part);
  const bool any_rows = d.kind == OpKind::kAllgather || d.kind == OpKind::kAlltoall;
  if (any_rows) request.rows.push_back(ndim == 0 ? 1 : shape[0]);
  const size_t at = d.layout.size();
  d.add_tensor(dtype, shape, ndim);
  if (any_rows && ndim > 0) d.layout[at + 2] = kAnyExtent;
}

// Where a part is. If that cannot be, the other ranks hear of it, too.
void place(Request& request, int number) {
  if (number == kHost) return;
  request.parts.back().on_device = true;
  try {
    request.device = &device_of(number);
  } catch (const Error& error) {
    request.refusal = error.what();
  }
}

// What cannot be read they hear of, too.
template <class F>
void choose(Request& request, const char* what, F&& read) {
  try {
    read();
  } catch (const UsageError& error) {
    request.refusal = error.what();
  } catch (const py::error_already_set& error) {
    request.refusal = std::string(what) + ": " + std::string(py::str(error.value()));
  }
}

// No integer can be multiplied by others, and NaN is not what any other rank gave, though it be
// NaN.
double as_factor(PyObject* object, const char* what) {
  const double factor = as_double(object);
  if (!std::isfinite(factor))
    throw UsageError(std::string(what) + "=" + std::string(py::str(py::handle(object))) +
                     " is no finite number");
  return factor;
}

void read_scales(Request& request, PyObject* before, PyObject* after) {
  Description& d = request.description;
  const auto read = [&](double& factor, PyObject* object, const char* what) {
    choose(request, what, [&] { factor = as_factor(object, what); });
  };
  read(d.prescale, before, "prescale_factor");
  read(d.postscale, after, "postscale_factor");
  if (!std::isfinite(d.prescale * d.postscale))  // sums are multiplied once, by both
    request.refusal = "prescale_factor times postscale_factor is no finite number";
}

// One (input address, output address, element type, shape, device).
void add_described(Request& request, PyObject* tensor) {
  if (PyTuple_GET_SIZE(tensor) != 5)
    throw py::type_error("a tensor is (input, output, dtype, shape, device)");
  const auto address = [&](int i) {
    return reinterpret_cast<char*>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(tensor, i)));
  };
  const std::vector<int64_t> shape = as_ints(PyTuple_GET_ITEM(tensor, 3));
  add_tensor(request, static_cast<DType>(as_int(PyTuple_GET_ITEM(tensor, 2))), shape.data(),
             shape.size(), {address(0), address(1)});
  place(request, static_cast<int>(as_int(PyTuple_GET_ITEM(tensor, 4))));
}

// False if the tensor is neither described nor plain. A plain one is input and output in one.
bool add_one(Request& request, PyObject* tensor) {
  if (PyTuple_Check(tensor)) {
    add_described(request, tensor);
    return true;
  }
  Plain plain;
  if (!read_plain(tensor, plain)) return false;
  add_tensor(request, plain.dtype, plain.shape, static_cast<size_t>(plain.ndim),
             {plain.data, plain.data});
  place(request, plain.device);
  return true;
}

// A tensor, or a list of tensors.
bool add_tensors(Request& request, PyObject* tensors) {
  if (!PyList_Check(tensors)) return add_one(request, tensors);
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  request.parts.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!add_one(request, PyList_GET_ITEM(tensors, i))) return false;
  return true;
}

bool is_described(PyObject* tensors) {
  if (!PyList_Check(tensors)) return PyTuple_Check(tensors);
  return PyList_GET_SIZE(tensors) == 0 || PyTuple_Check(PyList_GET_ITEM(tensors, 0));
}

// What this thread has given to its stream comes first; and behind the results its memory may be
// used again, in that stream's order, too.
void begin_here(Request& request) {
  const Device::Stream stream = current_stream(*request.device);
  request.starts = {request.device->mark(stream)};
  request.handle->began_on(stream);
}

constexpr const char* kSubmitDoc =
    "submit(engine, kind, name, tensors, op, root, prescale, postscale, set, splits, urgency, "
    "owner, result, codec=''): starts an operation; returns its Handle, or None if a tensor has to "
    "be described first.";

PyObject* submit(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 13 && count != 14) throw py::type_error("submit takes 13 arguments, or a codec");
    release_buried();
    auto engine = py::cast<std::shared_ptr<Engine>>(py::handle(args[0]));
    auto request = std::make_shared<Request>();
    Description& d = request->description;
    d.kind = static_cast<OpKind>(as_int(args[1]));
    request->name = as_string(args[2]);
    d.op = static_cast<ReduceOp>(as_int(args[4]));
    d.earlier = step_counts.earlier;
    d.failures = step_counts.failures;
    request->set = as_number(args[8], "process set");
    choose(*request, "root_rank", [&] { d.root = as_number(args[5], "root"); });
    read_scales(*request, args[6], args[7]);
    choose(*request, "splits", [&] { request->splits = as_ints(args[9]); });
    if (count == 14) d.codec = as_string(args[13]);
    if (!d.codec.empty()) parse_coding(d.codec);
    if (!add_tensors(*request, args[3])) return new_ref(Py_None);
    if (d.kind == OpKind::kAddProcessSet) d.layout = request->splits;
    d.on_device =
        !request->parts.empty() && std::all_of(request->parts.begin(), request->parts.end(),
                                               [](const Part& part) { return part.on_device; });
    if (request->device && request->refusal.empty()) begin_here(*request);
    request->keepalive = keep(args[11]);
    HandlePtr handle = request->handle;
    engine->submit(std::move(request), static_cast<Urgency>(as_int(args[10])));
    if (!is_described(args[3])) note_written(args[3]);
    return make_handle(std::move(engine), std::move(handle), args[12]);
  });
}

// count_steps(earlier, failures)
PyObject* count_steps(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    if (count != 2) throw py::type_error("count_steps takes 2 arguments");
    step_counts = {static_cast<int32_t>(as_int(args[0])), static_cast<int32_t>(as_int(args[1]))};
    return new_ref(Py_None);
  });
}

// The address of an object's buffer: what array.ctypes.data tells, ten times as fast.
PyObject* address(PyObject*, PyObject* object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) != 0) return nullptr;
  PyObject* address = PyLong_FromVoidPtr(view.buf);
  PyBuffer_Release(&view);
  return address;
}

PyMethodDef methods[] = {
    {"submit", as_method(submit), METH_FASTCALL, kSubmitDoc},
    {"count_steps", as_method(count_steps), METH_FASTCALL,
     "What this thread submits says from now on, as buckets do: exchanges in this step before, and "
     "backward passes that had failed."},
    {"address", address, METH_O, "The address of a contiguous buffer."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void add_submit(py::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace bagua
