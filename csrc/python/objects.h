// Python objects that C++ holds, numbers and texts out of them, and errors on their way to Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "common/errors.h"

namespace bagua {

namespace py = pybind11;

// Keeps the object alive. Whoever lets go of it need not hold the GIL: the object then waits for
// the main thread, or for release_buried, so that the engine itself never takes the GIL.
std::shared_ptr<void> keep(PyObject* object);
void release_buried();
// When Python ends, the engine's threads may still live. The module calls it when it is made.
void release_no_more_at_exit();

inline PyObject* new_ref(PyObject* object) {
  Py_INCREF(object);
  return object;
}

// A buffer that Python sees.
struct Memory {
  std::shared_ptr<char> data;
  int64_t nbytes;
  bool on_device = false;
};

int64_t as_int(PyObject* object);
// Of a rank or a process set; a UsageError names one that no 32 bits hold.
int32_t as_number(PyObject* object, const char* what);
double as_double(PyObject* object);
std::string as_string(PyObject* object);
std::vector<int64_t> as_ints(PyObject* sequence);

void set_error(const Error& error);

// What a function called by Python directly returns: f's result, or null with the error set.
template <class F>
PyObject* guarded(F&& f) {
  try {
    return f();
  } catch (const Error& error) {
    set_error(error);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// A new type out of its slots, added to the module. C++ alone makes objects of it.
PyTypeObject* add_type(py::module_& m, PyType_Spec& spec);

template <class F>
PyCFunction as_method(F f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

}  // namespace bagua
