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

struct Torch {
  PyObject* tensor;     // the class
  PyObject* increment;  // of a tensor's version
  bool several;         // takes a tuple of them, as newer ones do

  bool tell(PyObject* tensors) const {
    PyObject* const answer = PyObject_CallOneArg(increment, tensors);
    Py_XDECREF(answer);
    PyErr_Clear();
    return answer != nullptr;
  }
};

// Null where torch is not loaded, or has no such function.
const Torch* torch() {
  static const Torch* found = nullptr;
  static bool looked = false;
  if (looked) return found;
  const py::object modules = py::module_::import("sys").attr("modules");
  if (!modules.contains("torch")) return nullptr;
  const py::object module = modules["torch"];
  if (!py::hasattr(module, "Tensor")) return nullptr;  // it is being imported
  looked = true;
  const py::object tensor = module.attr("Tensor"), own = module.attr("_C");
  if (!py::hasattr(own, "_increment_version")) return nullptr;
  auto* fresh = new Torch{new_ref(tensor.ptr()), new_ref(own.attr("_increment_version").ptr()), 0};
  fresh->several = fresh->tell(py::tuple(0).ptr());
  return found = fresh;
}

bool is_torch(PyObject* tensor) {
  if (is_exchangeable(tensor)) return true;  // the quick answer; hardly any other objects are
  const Torch* known = torch();
  return known && PyObject_IsInstance(tensor, known->tensor) == 1;
}

}  // namespace

void note_written(PyObject* tensors) {
  const auto note = [](PyObject* tensor) {
    if (is_torch(tensor)) written().push_back(new_ref(tensor));
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
  const Torch* known = torch();
  if (!known || (known->several && known->tell(tensors.ptr()))) return;
  for (const py::handle tensor : tensors)
    known->tell(known->several ? py::make_tuple(tensor).ptr() : tensor.ptr());
}

}  // namespace bagua
