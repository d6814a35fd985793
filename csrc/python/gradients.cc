// What is done for all gradients of a bucket at once, by loops that are not Python's: finding them,
// filling the arena, starting the exchange and handing out what it has made of them.
#include "python/gradients.h"

#include <tuple>
#include <vector>

#include "engine/bucket.h"
#include "python/handle.h"
#include "python/notice.h"
#include "python/plain.h"

namespace bagua {
namespace {

PyObject* requires_grad_name;
PyObject* data_ptr_name;
PyObject* use_count_name;

char* data_of(PyObject* tensor) {
  const auto address =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, data_ptr_name));
  if (!address) throw py::error_already_set();
  return reinterpret_cast<char*>(as_int(address.ptr()));
}

// Calls f(i, object, notice) for each pair of two lists of one length.
template <class F>
void for_each_pair(PyObject* const* args, Py_ssize_t count, F&& f) {
  if (count != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1]) ||
      PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1]))
    throw py::type_error("two lists of one length are needed");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i)
    f(i, PyList_GET_ITEM(args[0], i), as_notice(PyList_GET_ITEM(args[1], i)));
}

// Lets `f` do its part for every one; returns the positions of those it left.
template <class F>
PyObject* try_all(PyObject* const* args, Py_ssize_t count, F&& f) {
  py::list left;
  for_each_pair(args, count, [&](Py_ssize_t i, PyObject* param, Notice& notice) {
    if (!f(notice, param)) left.append(i);
  });
  return left.release().ptr();
}
// locate(params, notices). What the caller's stream is given next finds gradients of a device.
PyObject* locate(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    if (count == 2 && PyList_Check(args[1]) && PyList_GET_SIZE(args[1]) > 0) {
      const auto& bucket = as_notice(PyList_GET_ITEM(args[1], 0)).bucket;
      if (bucket && bucket->device()) bucket->meet(current_stream(*bucket->device()));
    }
    return try_all(args, count, [](Notice& notice, PyObject* param) {
      return notice.find(grad_of(param).ptr());
    });
  });
}
// fill(views, notices, pairs), of one bucket: copies what has been located; to `pairs` it adds the
// view and the gradient of each that is on a device. Returns the positions of what it left.
PyObject* fill(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    if (count != 3) throw py::type_error("fill takes 3 lists");
    auto pairs = py::reinterpret_borrow<py::list>(args[2]);
    py::list left;
    int64_t copied_nbytes = 0;
    Bucket* bucket = nullptr;
    for_each_pair(args, 2, [&](Py_ssize_t i, PyObject* view, Notice& notice) {
      if (!notice.found) return;
      bucket = notice.bucket.get();
      switch (notice.fill()) {
        case Notice::Filled::kDone:
          copied_nbytes += notice.place.nbytes();
          break;
        case Notice::Filled::kOnDevice:
          pairs.append(py::make_tuple(py::handle(view), py::handle(notice.grad)));
          break;
        case Notice::Filled::kChanged:
          left.append(i);
      }
    });
    if (bucket) bucket->touch(2 * copied_nbytes);
    return left.release().ptr();
  });
}
// strays(params, notices): the positions of gradients that may be where another one belongs.
PyObject* strays(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    return try_all(args, count, [](Notice& notice, PyObject* param) {
      return notice.at_home(grad_of(param).ptr());
    });
  });
}

// holders(param): of its gradient, in Python, and in torch if this build tells.
PyObject* holders(PyObject*, PyObject* param) {
  return guarded([&] {
    const py::object grad = grad_of(param);
    const auto references = Py_REFCNT(grad.ptr());
    if (!PyObject_HasAttr(grad.ptr(), use_count_name))
      return py::make_tuple(references).release().ptr();
    const auto owners =
        py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(grad.ptr(), use_count_name));
    if (!owners) throw py::error_already_set();
    return py::make_tuple(references, owners).release().ptr();
  });
}

// part(bucket): what was located has been read by what the caller's stream has been given.
PyObject* part(PyObject*, PyObject* of) {
  return guarded([&] {
    const auto bucket = py::cast<std::shared_ptr<Bucket>>(py::handle(of));
    if (bucket->device()) bucket->part(current_stream(*bucket->device()));
    return new_ref(Py_None);
  });
}

PyObject* start(const py::handle& of, Urgency urgency, const std::vector<Bucket::Place>& places,
                const py::list& owners) {
  const auto bucket = py::cast<std::shared_ptr<Bucket>>(of);
  auto owner = places.empty() ? nullptr : keep(owners.ptr());
  std::vector<Device::Mark> starts;
  Device::Stream stream = nullptr;
  if (Device* device = bucket->device()) {
    stream = current_stream(*device);
    starts = {device->mark(stream)};
  }
  HandlePtr handle = bucket->launch(urgency, places, std::move(owner), std::move(starts));
  handle->began_on(stream);
  return make_handle(bucket->engine(), std::move(handle), Py_None);
}

// launch(bucket, urgency, notices): starts its exchange, of lent gradients where they are.
PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    if (count != 3) throw py::type_error("launch takes 3 arguments");
    std::vector<Bucket::Place> places;
    py::list owners;
    for (Py_ssize_t i = 0; i < PyList_Size(args[2]); ++i) {
      const Notice& notice = as_notice(PyList_GET_ITEM(args[2], i));
      if (!notice.lent) continue;
      places.push_back({notice.slot, data_of(notice.grad)});
      owners.append(py::handle(notice.grad));
    }
    return start(args[0], static_cast<Urgency>(as_int(args[1])), places, owners);
  });
}

// launch_lent(bucket, urgency, lent): the same; `lent` has (slot, tensor, address) of each.
PyObject* launch_lent(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    if (count != 3) throw py::type_error("launch_lent takes 3 arguments");
    std::vector<Bucket::Place> places;
    py::list owners;
    for (const py::handle& item : py::cast<py::list>(args[2])) {
      const auto [slot, owner, address] = py::cast<std::tuple<int, py::object, int64_t>>(item);
      places.push_back({slot, reinterpret_cast<char*>(address)});
      owners.append(owner);
    }
    return start(args[0], static_cast<Urgency>(as_int(args[1])), places, owners);
  });
}

// deliver(params, notices): makes what is in the arena the parameters' gradients; returns the
// positions of those where it cannot tell that the tensor still looks there.
PyObject* deliver(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    return try_all(args, count,
                   [](Notice& notice, PyObject* param) { return notice.deliver(param); });
  });
}

// unchanged(lists, params, flags): whether these lists, one after the other, hold exactly these
// parameters, and each of them requires a gradient if its flag is true.
PyObject* unchanged(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    if (count != 3) throw py::type_error("unchanged takes 3 lists");
    PyObject *lists = args[0], *params = args[1], *flags = args[2];
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(lists); ++i) {
      PyObject* list = PyList_GET_ITEM(lists, i);
      for (Py_ssize_t j = 0; j < PyList_Size(list); ++j, ++at) {
        PyObject* param = PyList_GET_ITEM(list, j);
        if (at >= PyList_Size(params) || param != PyList_GET_ITEM(params, at))
          return new_ref(Py_False);
        PyObject* required = PyObject_GetAttr(param, requires_grad_name);
        if (!required) throw py::error_already_set();
        Py_DECREF(required);
        if (required != PyList_GET_ITEM(flags, at)) return new_ref(Py_False);
      }
    }
    return new_ref(at == PyList_Size(params) ? Py_True : Py_False);
  });
}

PyMethodDef functions[] = {
    {"locate", as_method(locate), METH_FASTCALL, "Looks where gradients are."},
    {"fill", as_method(fill), METH_FASTCALL,
     "Copies those, or says which to copy, into the arena."},
    {"strays", as_method(strays), METH_FASTCALL, "Gradients that may be where others belong."},
    {"holders", holders, METH_O, "How many hold a parameter's gradient, in Python and in torch."},
    {"part", part, METH_O, "Lets streams that brought gradients go on."},
    {"launch", as_method(launch), METH_FASTCALL, "Starts the exchange of a bucket."},
    {"launch_lent", as_method(launch_lent), METH_FASTCALL,
     "Starts the exchange of a bucket, with large tensors where they are."},
    {"deliver", as_method(deliver), METH_FASTCALL, "Makes results the parameters' gradients."},
    {"unchanged", as_method(unchanged), METH_FASTCALL, "Whether these are still the parameters."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void add_gradient_functions(py::module_& m) {
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  data_ptr_name = PyUnicode_InternFromString("data_ptr");
  use_count_name = PyUnicode_InternFromString("_use_count");
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace bagua
