#include "python/objects.h"

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "python/written.h"

namespace bagua {
namespace {

// Its lock is the last that a thread takes, so forks may wait for it.
class Graveyard {
 public:
  static Graveyard& only() {
    static Graveyard* yard = new Graveyard;  // outlives every engine, also at exit
    return *yard;
  }
  // The main thread empties it between two steps of Python. It may never come there, and its list
  // of calls may be full: then the next call of the engine does.
  void bury(PyObject* object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.push_back(object);
    any_.store(true, std::memory_order_relaxed);
    if (!closed_ && !called_) called_ = Py_AddPendingCall(called, nullptr) == 0;
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
  // Python ends, and may not be called any more.
  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }

 private:
  Graveyard() {
    ::pthread_atfork([] { only().mutex_.lock(); }, [] { only().mutex_.unlock(); },
                     [] { only().begin_child(); });
  }
  // A child leaves them alone: they may be memory of a device, which it must not touch.
  void begin_child() {
    objects_.clear();
    any_ = false;
    closed_ = true;
    mutex_.unlock();
  }
  static int called(void*) {
    {
      std::lock_guard<std::mutex> lock(only().mutex_);
      only().called_ = false;
    }
    only().release();
    tell_written();  // which keeps tensors, too
    return 0;
  }

  std::mutex mutex_;  // of all but any_
  std::atomic<bool> any_{false};
  bool called_ = false, closed_ = false;
  std::vector<PyObject*> objects_;
};

}  // namespace

std::shared_ptr<void> keep(PyObject* object) {
  Py_INCREF(object);
  return std::shared_ptr<void>(object,
                               [](void* p) { Graveyard::only().bury(static_cast<PyObject*>(p)); });
}

void release_buried() { Graveyard::only().release(); }
void release_no_more_at_exit() {
  py::module_::import("atexit").attr("register")(
      py::cpp_function([] { Graveyard::only().close(); }));
}

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
  const char* names[] = {"UsageError", "PeerError", "InternalError", "LeftError", "JoinedError"};
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
