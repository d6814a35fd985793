// Written against Python's own interface: a step may make hundreds of handles, and this way one
// costs a tenth of a microsecond.
#include "python/handle.h"

#include <pybind11/stl.h>

#include <new>
#include <optional>
#include <utility>

#include "python/plain.h"
#include "python/written.h"

namespace bagua {
namespace {

struct PyHandle {
  PyObject_HEAD;
  std::shared_ptr<Engine> engine;  // until waited for
  HandlePtr handle;
  PyObject* result;
  PyObject* finish;  // or null
};

PyTypeObject* handle_type;

PyHandle& as_handle(PyObject* self) { return *reinterpret_cast<PyHandle*>(self); }

void dealloc(PyObject* self) {
  PyHandle& h = as_handle(self);
  Py_XDECREF(h.result);
  Py_XDECREF(h.finish);
  h.handle.~shared_ptr();
  h.engine.~shared_ptr();
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

// Blocks without the GIL, but lets Ctrl-C through between the slices, and within them where the
// engine asks.
template <class WaitSlice>
void wait_until(WaitSlice&& wait_slice) {
  constexpr double kSliceS = 0.25;
  std::optional<py::error_already_set> interrupt;
  const Interrupted interrupted = [&] {
    const py::gil_scoped_acquire acquire;
    if (!interrupt && PyErr_CheckSignals() != 0) interrupt.emplace();
    return interrupt.has_value();
  };
  for (bool done = false; !done;) {
    {
      py::gil_scoped_release release;
      done = wait_slice(kSliceS, interrupted);
    }
    if (interrupt) throw py::error_already_set(*interrupt);
    if (!done && PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// What the caller's stream is given next finds the results.
void follow(Handle& handle) {
  if (handle.device()) handle.make_follow(current_stream(*handle.device()));
}

void rethrow(const Handle& handle, Engine& engine) {
  try {
    handle.rethrow();
    if (const FailurePtr failure = handle.may_fail() ? engine.failure() : nullptr)
      throw_failure(*failure);
  } catch (const Error&) {
    // Who interrupts a job interrupts all ranks: that another one left is not what ends this one.
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    throw;
  }
}

PyObject* wait(PyObject* self, PyObject*) {
  return guarded([&] {
    PyHandle& h = as_handle(self);
    if (!h.engine)
      throw UsageError("this handle has been waited for already; keep the first result");
    if (!h.handle->done()) {
      const auto engine = h.engine;  // another thread may finish waiting first
      wait_until([&](double slice_s, const Interrupted& interrupted) {
        return engine->wait(*h.handle, slice_s, interrupted);
      });
      if (!h.engine) throw UsageError("another thread waited for this handle at the same time");
    }
    const auto engine = std::exchange(h.engine, nullptr);
    release_buried();
    tell_written();
    rethrow(*h.handle, *engine);
    follow(*h.handle);
    h.handle->let_go();
    if (!h.finish) return std::exchange(h.result, nullptr);
    PyObject* finish = std::exchange(h.finish, nullptr);
    PyObject* result = PyObject_CallOneArg(finish, self);
    Py_DECREF(finish);
    if (result) tell_written();  // it may have written more
    return result;
  });
}

PyObject* wait_values(PyObject* self, PyObject*) {
  return guarded([&] {
    PyHandle& h = as_handle(self);
    const auto engine = h.engine;
    if (engine && !h.handle->has_values())
      wait_until([&](double slice_s, const Interrupted&) {
        return engine->wait_values(*h.handle, slice_s);
      });
    tell_written();
    if (h.handle->done()) h.handle->rethrow();
    follow(*h.handle);
    return new_ref(Py_None);
  });
}

PyObject* call(PyObject* self, PyObject*, PyObject*) { return wait(self, nullptr); }

PyObject* poll(PyObject* self, PyObject*) {
  return PyBool_FromLong(as_handle(self).handle->done());
}

PyObject* reached(PyObject* self, PyObject*) {
  return guarded([&] {
    const Handle& handle = *as_handle(self).handle;
    return PyBool_FromLong(handle.done() && handle.reached());
  });
}

const Output& output_of(PyHandle& h, PyObject* index) {
  if (!h.handle->done()) throw UsageError("the operation is not done; wait for it first");
  const auto i = static_cast<size_t>(as_int(index));
  if (i >= h.handle->outputs.size()) throw py::index_error("no such output");
  return h.handle->outputs[i];
}

PyObject* rows(PyObject* self, PyObject* index) {
  return guarded([&] { return py::cast(output_of(as_handle(self), index).rows).release().ptr(); });
}

// output(i, row_nbytes): the memory of all ranks' rows.
PyObject* output(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    if (count != 2) throw py::type_error("output takes 2 arguments");
    const Output& output = output_of(as_handle(self), args[0]);
    int64_t rows = 0;
    for (const int64_t n : output.rows) rows += n;
    Memory memory{output.data, rows * as_int(args[1]), output.on_device};
    return py::cast(std::make_shared<Memory>(std::move(memory))).release().ptr();
  });
}

PyObject* get_value(PyObject* self, void*) {
  return PyLong_FromLongLong(as_handle(self).handle->value);
}

PyObject* get_odd(PyObject* self, void*) {
  return guarded([&] {
    const Handle& handle = *as_handle(self).handle;
    if (!handle.has_values() || handle.odd.empty()) return PyTuple_New(0);
    return py::tuple(py::cast(handle.odd)).release().ptr();
  });
}

PyObject* get_finish(PyObject* self, void*) {
  PyObject* finish = as_handle(self).finish;
  return new_ref(finish ? finish : Py_None);
}

int set_finish(PyObject* self, PyObject* finish, void*) {
  Py_XINCREF(finish);
  Py_XSETREF(as_handle(self).finish, finish);
  return 0;
}

PyMethodDef methods[] = {
    {"wait", wait, METH_NOARGS, "Blocks until the operation is done and returns its result; once."},
    {"reached", reached, METH_NOARGS, "Whether it is done, and the device has come so far."},
    {"wait_values", wait_values, METH_NOARGS,
     "Blocks until the values are final; of some operations they are before it is done."},
    {"poll", poll, METH_NOARGS, "Whether the operation is done; never blocks."},
    {"rows", rows, METH_O, "Rows of an output that came from each rank."},
    {"output", as_method(output), METH_FASTCALL, "An output's memory."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef properties[] = {
    {"finish", get_finish, set_finish, "Makes the result of this finished handle.", nullptr},
    {"value", get_value, nullptr, "The number an operation without tensors gives.", nullptr},
    {"odd", get_odd, nullptr,
     "Ranks whose values held a NaN or an Inf, as far as this one has reduced them; -1: some "
     "rank's.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(call)},  // Horovod's sparse handles are called
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("A started operation.")},
    {0, nullptr},
};
PyType_Spec spec = {"bagua._core.Handle", sizeof(PyHandle), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

void add_handle_type(py::module_& m) { handle_type = add_type(m, spec); }

PyObject* make_handle(std::shared_ptr<Engine> engine, HandlePtr handle, PyObject* result) {
  PyHandle* self = PyObject_New(PyHandle, handle_type);
  if (!self) throw py::error_already_set();
  new (&self->engine) std::shared_ptr<Engine>(std::move(engine));
  new (&self->handle) HandlePtr(std::move(handle));
  self->result = new_ref(result);
  self->finish = nullptr;
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace bagua
