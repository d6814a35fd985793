#include "python/written.h"

#include <utility>
#include <vector>

#include "python/plain.h"

namespace bagua {
namespace {

constexpr size_t kMost = 1000;  // are kept alive until torch is told

std::vector<PyObject*>& written() {
  static auto* tensors = new std::vector<PyObject*>;
  return *tensors;
}

// Null where torch is not loaded, or too old to be told of several at once.
PyObject* torch_increment() {
  static PyObject* increment = nullptr;
  static bool looked = false;
  if (looked) return increment;
  if (!py::module_::import("sys").attr("modules").contains("torch")) return nullptr;
  looked = true;
  const py::module_ torch = py::module_::import("torch._C");
  if (!py::hasattr(torch, "_increment_version")) return nullptr;
  PyObject* const function = py::object(torch.attr("_increment_version")).release().ptr();
  const py::tuple none(0);
  PyObject* const answer = PyObject_CallOneArg(function, none.ptr());
  if (answer) increment = function;
  Py_XDECREF(answer);
  PyErr_Clear();
  return increment;
}

}  // namespace

void note_written(PyObject* tensors) {
  const auto note = [](PyObject* tensor) {
    if (is_exchangeable(tensor)) written().push_back(new_ref(tensor));
  };
  if (PyList_Check(tensors)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) note(PyList_GET_ITEM(tensors, i));
  } else {
    note(tensors);
  }
  if (written().size() > kMost) tell_written();
}

void tell_written() {
  if (written().empty()) return;
  const std::vector<PyObject*> mine = std::exchange(written(), {});  // what follows may come here
  const py::tuple tensors(mine.size());
  for (size_t i = 0; i < mine.size(); ++i)
    PyTuple_SET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i), mine[i]);
  PyObject* const increment = torch_increment();
  if (!increment) return;
  PyObject* const answer = PyObject_CallOneArg(increment, tensors.ptr());
  Py_XDECREF(answer);
  if (answer) return;
  PyErr_Clear();
  for (const py::handle tensor : tensors) {  // not all are torch's
    Py_XDECREF(PyObject_CallOneArg(increment, py::make_tuple(tensor).ptr()));
    PyErr_Clear();
  }
}

}  // namespace bagua
