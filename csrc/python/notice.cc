// A model may have hundreds of small gradients, and calling Python for each would cost more than
// exchanging them. A Notice counts by itself and calls Python only when there is something to
// decide; the arena is filled and handed out by loops that are not Python's.
#include "python/notice.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/bucket.h"
#include "engine/exchange.h"
#include "kernel/stream.h"
#include "python/handle.h"
#include "python/plain.h"

namespace bagua {
namespace {

// Larger gradients are left to torch, which copies with all its threads and without the GIL.
constexpr int64_t kSmallNbytes = 256 << 10;

struct Notice {
  PyObject_HEAD;
  PyObject* decide;  // called with the parameter
  std::shared_ptr<Bucket> bucket;
  int slot;
  PyObject* view;  // the slot's place in the arena, as the tensor that users get
  Plain place;     // the same; no data if it cannot be written from here
  PyObject* grad;  // what is to be copied into the arena, or is lent; or null
  bool lent;       // it is exchanged where it is, this time
};

PyTypeObject* notice_type;
PyObject* grad_name;
PyObject* requires_grad_name;
PyObject* data_ptr_name;
PyObject* use_count_name;

Notice& as_notice(PyObject* self) { return *reinterpret_cast<Notice*>(self); }

int64_t nbytes_of(const Plain& tensor) {
  return tensor.count() * static_cast<int64_t>(dtype_nbytes(tensor.dtype));
}

bool alike(const Plain& a, const Plain& b) {
  return a.device == b.device && a.dtype == b.dtype && a.ndim == b.ndim &&
         std::equal(a.shape, a.shape + a.ndim, b.shape);
}

PyObject* grad_of(PyObject* param) {
  PyObject* grad = PyObject_GetAttr(param, grad_name);
  if (!grad) throw py::error_already_set();
  return grad;
}

char* data_of(PyObject* tensor) {
  const auto address =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, data_ptr_name));
  if (!address) throw py::error_already_set();
  return reinterpret_cast<char*>(as_int(address.ptr()));
}

// Whether the gradient was read, in memory like the slot's.
bool read_grad(const Notice& notice, PyObject* grad, Plain& source) {
  return notice.place.data && read_plain(grad, source) && alike(source, notice.place);
}

// Users may make a tensor look at other memory, by `.data =`, and many a conversion of a model does
// so with the gradients that it finds.
bool still_in_arena(const Notice& notice) {
  Plain now;
  return read_grad(notice, notice.view, now) && now.data == notice.place.data;
}

void keep_grad(Notice& notice, PyObject* grad, bool lent) {
  Py_XSETREF(notice.grad, new_ref(grad));
  notice.lent = lent;
}

bool copied_here(const Plain& source) {
  return nbytes_of(source) <= kSmallNbytes && source.device == kHost &&
         !Bucket::in_an_arena(source.data);
}

// Looks where the gradient is; fill() copies it if it is not in the arena yet. False: that is left
// to the caller, as all that is in some arena's memory, which may be written to before.
bool find(Notice& notice, PyObject* grad) {
  Py_CLEAR(notice.grad);
  Plain source;
  if (!read_grad(notice, grad, source)) return false;
  if (source.data == notice.place.data) return true;
  if (!copied_here(source)) return false;
  keep_grad(notice, grad, /*lent=*/false);
  return true;
}

// False: since it was found, another thread has given the gradient other memory that is not read
// here.
bool fill_from_found(Notice& notice) {
  const auto grad = py::reinterpret_steal<py::object>(std::exchange(notice.grad, nullptr));
  Plain source;
  if (!read_grad(notice, grad.ptr(), source) || !copied_here(source)) return false;
  plain_copy(notice.place.data, source.data, static_cast<size_t>(nbytes_of(source)));
  return true;
}

// Whether no other slot's place is what the gradient looks at. False: in doubt, too.
bool at_home(Notice& notice, PyObject* grad) {
  if (grad == Py_None) return true;
  Plain now;
  if (!read_plain(grad, now)) return false;
  return (read_grad(notice, grad, now) && now.data == notice.place.data) ||
         !Bucket::in_an_arena(now.data);
}

// Makes what has been exchanged the parameter's gradient. False: that is left to the caller.
bool take(Notice& notice, PyObject* param) {
  if (!notice.grad && !still_in_arena(notice)) return false;
  PyObject* now = grad_of(param);
  Py_DECREF(now);
  PyObject* result = notice.grad ? notice.grad : notice.view;
  if (now != result && PyObject_SetAttr(param, grad_name, result) != 0)
    throw py::error_already_set();
  Py_CLEAR(notice.grad);
  return true;
}

PyObject* call(PyObject* self, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    if (PyTuple_GET_SIZE(args) != 1) throw py::type_error("a notice takes one parameter");
    PyObject* param = PyTuple_GET_ITEM(args, 0);
    const Notice& notice = as_notice(self);
    if (notice.bucket && notice.bucket->device())
      notice.bucket->came_by(current_stream(*notice.bucket->device()));
    if (notice.bucket && notice.bucket->quiet() && notice.bucket->ready_but_not_last(notice.slot))
      return new_ref(Py_None);
    if (!notice.decide) return new_ref(Py_None);  // being collected
    return PyObject_CallOneArg(notice.decide, param);
  });
}

// bind(bucket, slot, view)
PyObject* bind(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    if (count != 3) throw py::type_error("bind takes 3 arguments");
    Notice& notice = as_notice(self);
    notice.bucket = py::cast<std::shared_ptr<Bucket>>(py::handle(args[0]));
    notice.slot = static_cast<int>(as_int(args[1]));
    Py_XSETREF(notice.view, new_ref(args[2]));
    if (!read_plain(notice.view, notice.place)) notice.place.data = nullptr;
    return new_ref(Py_None);
  });
}

PyObject* unbind(PyObject* self, PyObject*) {
  as_notice(self).bucket.reset();
  return new_ref(Py_None);
}

// lend(gradient): this time it is exchanged in place.
PyObject* lend_method(PyObject* self, PyObject* grad) {
  keep_grad(as_notice(self), grad, /*lent=*/true);
  return new_ref(Py_None);
}

// Hook, slot, view and parameter refer to each other in a circle, so the collector must see it.
int traverse(PyObject* self, visitproc visit, void* arg) {
  const Notice& notice = as_notice(self);
  Py_VISIT(notice.decide);
  Py_VISIT(notice.view);
  Py_VISIT(notice.grad);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  Notice& notice = as_notice(self);
  notice.bucket.reset();
  Py_CLEAR(notice.decide);
  Py_CLEAR(notice.view);
  Py_CLEAR(notice.grad);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  as_notice(self).bucket.~shared_ptr();
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

// notice(decide): a hook that does nothing but calling decide(parameter), until it is bound.
PyObject* make_notice(PyObject*, PyObject* decide) {
  Notice* self = PyObject_GC_New(Notice, notice_type);
  if (!self) return nullptr;
  self->decide = new_ref(decide);
  new (&self->bucket) std::shared_ptr<Bucket>();
  self->view = self->grad = nullptr;
  PyObject_GC_Track(reinterpret_cast<PyObject*>(self));
  return reinterpret_cast<PyObject*>(self);
}

PyMethodDef methods[] = {
    {"bind", as_method(bind), METH_FASTCALL, "From now on this gradient is a slot of a bucket."},
    {"lend", lend_method, METH_O, "This gradient is exchanged in place."},
    {"unbind", unbind, METH_NOARGS, "From now on every call is passed on."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_call, reinterpret_cast<void*>(call)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("Called by autograd with a parameter whose gradient is there.")},
    {0, nullptr},
};
PyType_Spec spec = {"bagua._core.Notice", sizeof(Notice), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

// Calls f(i, parameter, item) for each pair of two lists of one length.
template <class F>
void for_each_pair(PyObject* const* args, Py_ssize_t count, F&& f) {
  if (count != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1]) ||
      PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1]))
    throw py::type_error("two lists of one length are needed");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i)
    f(i, PyList_GET_ITEM(args[0], i), PyList_GET_ITEM(args[1], i));
}

// Lets `f` do its part for every gradient; returns the positions of those it left.
PyObject* try_all(PyObject* const* args, Py_ssize_t count, bool (*f)(Notice&, PyObject*)) {
  py::list left;
  for_each_pair(args, count, [&](Py_ssize_t i, PyObject* param, PyObject* notice) {
    const auto grad = py::reinterpret_steal<py::object>(grad_of(param));
    if (!f(as_notice(notice), grad.ptr())) left.append(i);
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
    return try_all(args, count, find);
  });
}
// fill(notices): copies what has been located; returns the positions of what it left.
PyObject* fill(PyObject*, PyObject* notices) {
  return guarded([&] {
    py::list left;
    for (Py_ssize_t i = 0; i < PyList_Size(notices); ++i) {
      Notice& notice = as_notice(PyList_GET_ITEM(notices, i));
      if (notice.grad && !notice.lent && !fill_from_found(notice)) left.append(i);
    }
    return left.release().ptr();
  });
}
// strays(params, notices): the positions of gradients that may be where another one belongs.
PyObject* strays(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] { return try_all(args, count, at_home); });
}

// holders(param): of its gradient, in Python, and in torch if this build tells.
PyObject* holders(PyObject*, PyObject* param) {
  return guarded([&] {
    const auto grad = py::reinterpret_steal<py::object>(grad_of(param));
    const auto references = Py_REFCNT(grad.ptr());
    if (!PyObject_HasAttr(grad.ptr(), use_count_name))
      return py::make_tuple(references).release().ptr();
    const auto owners =
        py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(grad.ptr(), use_count_name));
    if (!owners) throw py::error_already_set();
    return py::make_tuple(references, owners).release().ptr();
  });
}

PyObject* start(const py::handle& of, Engine::Urgency urgency,
                const std::vector<Bucket::Place>& places, const py::list& owners) {
  const auto bucket = py::cast<std::shared_ptr<Bucket>>(of);
  auto owner = places.empty() ? nullptr : keep(owners.ptr());
  std::vector<Device::Mark> starts;
  Device::Stream stream = nullptr;
  if (Device* device = bucket->device()) {
    stream = current_stream(*device);
    starts = {device->mark(stream)};
    bucket->part(starts[0]);
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
      if (!notice.grad) continue;
      places.push_back({notice.slot, data_of(notice.grad)});
      owners.append(py::handle(notice.grad));
    }
    return start(args[0], static_cast<Engine::Urgency>(as_int(args[1])), places, owners);
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
    return start(args[0], static_cast<Engine::Urgency>(as_int(args[1])), places, owners);
  });
}

// deliver(params, notices): makes what is in the arena the parameters' gradients; returns the
// positions of those where it cannot tell that the tensor still looks there.
PyObject* deliver(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    py::list left;
    for_each_pair(args, count, [&](Py_ssize_t i, PyObject* param, PyObject* notice) {
      if (!take(as_notice(notice), param)) left.append(i);
    });
    return left.release().ptr();
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
    {"fill", fill, METH_O, "Copies those into the arena."},
    {"strays", as_method(strays), METH_FASTCALL, "Gradients that may be where others belong."},
    {"holders", holders, METH_O, "How many hold a parameter's gradient, in Python and in torch."},
    {"launch", as_method(launch), METH_FASTCALL, "Starts the exchange of a bucket."},
    {"launch_lent", as_method(launch_lent), METH_FASTCALL,
     "Starts the exchange of a bucket, with large tensors where they are."},
    {"deliver", as_method(deliver), METH_FASTCALL, "Makes results the parameters' gradients."},
    {"unchanged", as_method(unchanged), METH_FASTCALL, "Whether these are still the parameters."},
    {"notice", make_notice, METH_O,
     "A hook that calls this function, less often when it is bound."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void add_notice_type(py::module_& m) {
  grad_name = PyUnicode_InternFromString("grad");
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  data_ptr_name = PyUnicode_InternFromString("data_ptr");
  use_count_name = PyUnicode_InternFromString("_use_count");
  notice_type = add_type(m, spec);
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace bagua
