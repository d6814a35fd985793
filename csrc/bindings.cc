// The only file that knows Python. Tensors come in as (pointer, element type, shape); results of
// unknown size go out as buffers that the engine owns.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <mutex>
#include <utility>

#include "collective/collective.h"
#include "common/config.h"
#include "control/socket_channel.h"
#include "engine/bucket.h"
#include "engine/engine.h"
#include "transport/mpi.h"

namespace py = pybind11;
using namespace bagua;

namespace {

// Objects the engine no longer needs wait here for a thread that holds the GIL, so that the engine
// itself never takes it.
class Graveyard {
 public:
  void bury(PyObject* object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.push_back(object);
  }
  void drain() {
    std::vector<PyObject*> objects;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      objects.swap(objects_);
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
};

Graveyard& graveyard() {
  static Graveyard* yard = new Graveyard;  // outlives every engine, also at exit
  return *yard;
}

std::shared_ptr<void> keep(PyObject* object) {
  Py_INCREF(object);
  return std::shared_ptr<void>(object,
                               [](void* p) { graveyard().bury(static_cast<PyObject*>(p)); });
}

struct PyHandle {
  std::shared_ptr<Engine> engine;
  HandlePtr handle;
  // What wait() returns: finish(this handle) if there is such a function, else the result.
  py::object result, finish;

  // Blocks without the GIL, but lets Ctrl-C through between the slices.
  void wait_done() const {
    constexpr double kSliceS = 0.25;
    const auto engine = this->engine;  // another thread may finish waiting first
    while (!handle->done()) {
      bool done;
      {
        py::gil_scoped_release release;
        done = engine->wait(*handle, kSliceS);
      }
      if (!done && PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    graveyard().drain();
  }

  py::object wait(const py::object& self) {
    if (!engine) throw UsageError("this handle has been waited for already; keep the first result");
    wait_done();
    if (!std::exchange(engine, nullptr))
      throw UsageError("another thread waited for this handle at the same time");
    handle->rethrow();
    if (!finish) return std::move(result);
    return std::exchange(finish, py::object())(self);
  }
};

struct PyMemory {
  std::shared_ptr<char> data;
  int64_t nbytes;
};

Config config_from(const py::dict& d) {
  Config c;
  c.allreduce = d["allreduce"].cast<std::string>();
  c.fusion_nbytes = static_cast<int64_t>(d["fusion_mb"].cast<double>() * (1 << 20));
  c.stall_warn_s = d["stall_warn_s"].cast<double>();
  c.stall_fail_s = d["stall_fail_s"].cast<double>();
  c.peer_timeout_s = d["peer_timeout_s"].cast<double>();
  c.start_timeout_s = d["start_timeout_s"].cast<double>();
  c.spin_us = d["spin_us"].cast<double>();
  c.inline_drive = d["inline_drive"].cast<bool>();
  c.network_interfaces = d["network_interfaces"].cast<std::string>();
  c.log_level = d["log_level"].cast<std::string>();
  return c;
}

std::shared_ptr<Engine> start_engine(uintptr_t communicator, SocketListener* listener,
                                     const std::string& address, int rank, const py::dict& settings,
                                     const std::vector<std::string>& names) {
  const Config config = config_from(settings);
  py::gil_scoped_release release;
  auto channel = listener ? listener->accept(config.start_timeout_s)
                          : connect_channel(address, rank, config.start_timeout_s);
  return std::make_shared<Engine>(config, connect_mpi(reinterpret_cast<void*>(communicator)),
                                  std::move(channel), names);
}

int64_t as_int(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

double as_double(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

std::string as_string(PyObject* object) {
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

// One (input address, output address, element type, shape).
void add_tensor(Request& request, PyObject* tensor) {
  if (!PyTuple_Check(tensor) || PyTuple_GET_SIZE(tensor) != 4)
    throw py::type_error("a tensor is (input, output, dtype, shape)");
  const auto address = [&](int i) {
    return reinterpret_cast<char*>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(tensor, i)));
  };
  Description& d = request.description;
  std::vector<int64_t> shape = as_ints(PyTuple_GET_ITEM(tensor, 3));
  request.parts.push_back({address(0), address(1)});
  request.rows.push_back(shape.empty() ? 1 : shape[0]);
  const bool any_rows = d.kind == OpKind::kAllgather || d.kind == OpKind::kAlltoall;
  if (any_rows && !shape.empty()) shape[0] = kAnyExtent;
  d.add_tensor(static_cast<DType>(as_int(PyTuple_GET_ITEM(tensor, 2))), shape);
}

// submit(engine, kind, name, tensors, op, root, prescale, postscale, set, splits, urgency, owner,
// result): the hot call, so its arguments are read by hand instead of by pybind11's casters.
PyHandle submit(PyObject* const* args) {
  graveyard().drain();
  auto engine = py::cast<std::shared_ptr<Engine>>(py::handle(args[0]));
  auto request = std::make_shared<Request>();
  Description& d = request->description;
  d.kind = static_cast<OpKind>(as_int(args[1]));
  request->name = as_string(args[2]);
  d.op = static_cast<ReduceOp>(as_int(args[4]));
  d.root = static_cast<int32_t>(as_int(args[5]));
  d.prescale = as_double(args[6]);
  d.postscale = as_double(args[7]);
  request->set = static_cast<int32_t>(as_int(args[8]));
  request->splits = as_ints(args[9]);
  if (!PyList_Check(args[3])) throw py::type_error("tensors must be a list");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[3]); ++i)
    add_tensor(*request, PyList_GET_ITEM(args[3], i));
  if (d.kind == OpKind::kAddProcessSet) d.layout = request->splits;
  request->keepalive = keep(args[11]);
  HandlePtr handle = request->handle;
  engine->submit(std::move(request), static_cast<Engine::Urgency>(as_int(args[10])));
  return {std::move(engine), std::move(handle), py::reinterpret_borrow<py::object>(args[12]),
          py::object()};
}

py::object error_class(const char* name) {
  return py::module_::import("bagua.common.errors").attr(name);
}

void set_error(const Error& error) {
  const char* names[] = {"UsageError", "PeerError", "InternalError"};
  PyErr_SetString(error_class(names[static_cast<int>(error.kind())]).ptr(), error.what());
}

// The caller found something wrong before there was anything to submit: tells the other ranks that
// make the same call, and throws the UsageError.
void refuse(const std::shared_ptr<Engine>& engine, int kind, const std::string& name, int set,
            const std::string& refusal) {
  auto request = std::make_shared<Request>();
  request->description.kind = static_cast<OpKind>(kind);
  request->name = name;
  request->set = set;
  request->refusal = refusal;
  engine->submit(std::move(request), Engine::Urgency::kNow);
}

PyObject* submit_raw(PyObject*, PyObject* const* args, Py_ssize_t count) {
  try {
    if (count != 13) throw py::type_error("submit takes 13 arguments");
    return py::cast(submit(args)).release().ptr();
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

// The address of an object's buffer: what array.ctypes.data tells, ten times as fast.
PyObject* address_raw(PyObject*, PyObject* object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) != 0) return nullptr;
  PyObject* address = PyLong_FromVoidPtr(view.buf);
  PyBuffer_Release(&view);
  return address;
}

PyMethodDef raw_methods[] = {
    {"submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(submit_raw)),
     METH_FASTCALL, "Starts an operation; returns its Handle."},
    {"address", address_raw, METH_O, "The address of a contiguous buffer."},
    {nullptr, nullptr, 0, nullptr},
};

py::dict build_info() {
  py::dict info;
  info["version"] = BAGUA_VERSION;
  info["mpi"] = mpi_compiled();
  info["compiler"] = __VERSION__;
  info["transports"] = std::vector<std::string>{"mpi"};
  std::vector<std::string> names;
  for (const Collective& row : collectives()) names.push_back(row.name);
  info["collectives"] = names;
  info["codecs"] = std::vector<std::string>{"raw"};
  info["cuda"] = "not built";
  info["nccl"] = "not built";
  return info;
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    set_error(error);
  }
}

template <class T, class Nbytes>
py::class_<T, std::shared_ptr<T>> buffer_class(py::module_& m, const char* name, Nbytes nbytes) {
  return py::class_<T, std::shared_ptr<T>>(m, name, py::buffer_protocol())
      .def_buffer([nbytes](T& t) {
        auto [data, size] = nbytes(t);
        return py::buffer_info(reinterpret_cast<uint8_t*>(data), size);
      });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  py::register_exception_translator(translate);
  if (PyModule_AddFunctions(m.ptr(), raw_methods) != 0) throw py::error_already_set();
  m.def("refuse", refuse);
  // In a forked child the engine's thread does not exist: nobody may ever wait for it.
  m.def("abandon", [](std::shared_ptr<Engine> engine) { new std::shared_ptr<Engine>(engine); });
  m.def("build_info", build_info);
  m.def("mpi_compiled", mpi_compiled);

  py::class_<SocketListener>(m, "Listener")
      .def(py::init<int, const std::string&>())
      .def_property_readonly("address", &SocketListener::address);

  buffer_class<PyMemory>(m, "Memory",
                         [](PyMemory& t) { return std::pair(t.data.get(), t.nbytes); });

  py::class_<PyHandle>(m, "Handle")
      .def(
          "wait", [](const py::object& self) { return py::cast<PyHandle&>(self).wait(self); },
          "Blocks until the operation is done and returns its result; once.")
      .def(
          "poll", [](const PyHandle& h) { return h.handle->done(); },
          "Whether the operation is done; never blocks.")
      .def("__call__",  // Horovod's users call the handle of a sparse allreduce
           [](const py::object& self) { return py::cast<PyHandle&>(self).wait(self); })
      .def_readwrite("finish", &PyHandle::finish)
      .def_property_readonly("value", [](const PyHandle& h) { return h.handle->value; })
      .def("rows",
           [](const PyHandle& h, size_t i) {
             if (!h.handle->done())
               throw UsageError("the operation is not done; wait for it first");
             return h.handle->outputs.at(i).rows;
           })
      // Memory of output i: all ranks' rows of row_nbytes each.
      .def("output", [](const PyHandle& h, size_t i, int64_t row_nbytes) {
        const Output& output = h.handle->outputs.at(i);
        int64_t rows = 0;
        for (const int64_t n : output.rows) rows += n;
        return std::make_shared<PyMemory>(PyMemory{output.data, rows * row_nbytes});
      });

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init(&start_engine), py::arg("communicator"), py::arg("listener").none(true),
           py::arg("address"), py::arg("rank"), py::arg("settings"), py::arg("names"))
      .def_property_readonly("rank", &Engine::rank)
      .def_property_readonly("size", &Engine::size)
      .def("ranks_of", &Engine::ranks_of)
      .def("stop", &Engine::stop)
      .def("wait_stopped", &Engine::wait_stopped, py::call_guard<py::gil_scoped_release>())
      .def("failure",
           [](Engine& e) {
             return e.failure() ? py::object(py::str(e.failure()->what)) : py::none();
           })
      .def("counters", [](const Engine& e) {
        py::dict d;
        d["sent_nbytes"] = e.sent_nbytes();
        d["exchanges"] = e.exchange_count();
        d["control_messages"] = e.message_count();
        return d;
      });

  buffer_class<Bucket>(m, "Bucket", [](Bucket& b) { return std::pair(b.data(), b.nbytes()); })
      .def(py::init([](std::shared_ptr<Engine> engine, const std::string& name, int dtype,
                       const std::vector<int64_t>& counts, int op, double prescale,
                       double postscale, int set, int priority) {
             Description d;
             d.op = static_cast<ReduceOp>(op);
             d.prescale = prescale;
             d.postscale = postscale;
             return std::make_shared<Bucket>(std::move(engine), name, static_cast<DType>(dtype),
                                             counts, d, set, priority);
           }),
           py::arg("engine"), py::arg("name"), py::arg("dtype"), py::arg("counts"), py::arg("op"),
           py::arg("prescale"), py::arg("postscale"), py::arg("set"), py::arg("priority"))
      .def_property_readonly("begins", &Bucket::begins)
      .def("ready", &Bucket::ready)
      .def("refuse", &Bucket::refuse)
      .def("missing", &Bucket::missing)
      .def("launch", [](Bucket& b, int urgency) {
        return PyHandle{b.engine(), b.launch(static_cast<Engine::Urgency>(urgency)), py::none(),
                        py::object()};
      });
}
