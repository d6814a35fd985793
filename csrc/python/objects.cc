#include "python/objects.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

namespace bagua {
namespace {

class Graveyard {
 public:
  void bury(PyObject* object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.push_back(object);
    any_.store(true, std::memory_order_relaxed);
  }
  void release() {
    if (!any_.load(std::memory_order_relaxed)) return;
    std::vector<PyObject*> objects;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      objects.swap(objects_);
      any_.store(false, std::memory_order_relaxed);
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> any_{false};
  std::vector<PyObject*> objects_;
};

Graveyard& graveyard() {
  static Graveyard* yard = new Graveyard;  // outlives every engine, also at exit
  return *yard;
}

}  // namespace

std::shared_ptr<void> keep(PyObject* object) {
  Py_INCREF(object);
  return std::shared_ptr<void>(object,
                               [](void* p) { graveyard().bury(static_cast<PyObject*>(p)); });
}

void release_buried() { graveyard().release(); }

int64_t as_int(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

int32_t as_number(PyObject* object, const char* what) {
  int overflow = 0;
  const auto value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  const auto number = static_cast<int32_t>(value);
  if (overflow || number != value)
    throw UsageError(std::string(what) + " " + std::string(py::str(py::handle(object))) +
                     " does not exist: numbers end at " + std::to_string(INT32_MAX));
  return number;
}

double as_double(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

std::string as_string(PyObject* object) {
  if (!PyUnicode_Check(object))
    throw UsageError(std::string("a name is a str, not ") + Py_TYPE(object)->tp_name);
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &length);
  if (!text) throw py::error_already_set();
  return {text, static_cast<size_t>(length)};
}

std::vector<int64_t> as_ints(PyObject* sequence) {
  const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(sequence, "not a sequence"));
  if (!fast) throw py::error_already_set();
  std::vector<int64_t> numbers(static_cast<size_t>(PySequence_Fast_GET_SIZE(fast.ptr())));
  PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = as_int(items[i]);
  return numbers;
}

void set_error(const Error& error) {
  const char* names[] = {"UsageError", "PeerError", "InternalError"};
  const auto type =
      py::module_::import("bagua.common.errors").attr(names[static_cast<int>(error.kind())]);
  PyErr_SetString(type.ptr(), error.what());
}

PyTypeObject* add_type(py::module_& m, PyType_Spec& spec) {
  PyObject* type = PyType_FromSpec(&spec);
  if (!type) throw py::error_already_set();
  reinterpret_cast<PyTypeObject*>(type)->tp_new = nullptr;
  const std::string name = spec.name;
  m.add_object(name.substr(name.rfind('.') + 1).c_str(), type);
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace bagua
