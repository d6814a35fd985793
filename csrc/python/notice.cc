// A model may have hundreds of small gradients, and calling Python for each would cost more than
// exchanging them. A Notice counts by itself and calls Python only when there is something to
// decide.
#include "python/notice.h"

#include <algorithm>
#include <new>
#include <utility>

#include "kernel/stream.h"

namespace bagua {
namespace {

// Larger gradients are left to torch, which copies with all its threads and without the GIL.
constexpr int64_t kSmallNbytes = 256 << 10;

PyTypeObject* notice_type;
PyObject* grad_name;

bool alike(const Plain& a, const Plain& b) {
  return a.device == b.device && a.dtype == b.dtype && a.ndim == b.ndim &&
         std::equal(a.shape, a.shape + a.ndim, b.shape);
}

// Those of a device torch copies, many at once.
bool is_copied(const Plain& source) {
  return (source.device != kHost || source.nbytes() <= kSmallNbytes) &&
         !Bucket::in_an_arena(source.data);
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
    notice.forget();
    notice.bucket = py::cast<std::shared_ptr<Bucket>>(py::handle(args[0]));
    notice.slot = static_cast<int>(as_int(args[1]));
    Py_XSETREF(notice.view, new_ref(args[2]));
    if (!read_plain(notice.view, notice.place)) notice.place.data = nullptr;
    return new_ref(Py_None);
  });
}

PyObject* unbind(PyObject* self, PyObject*) {
  as_notice(self).forget();
  as_notice(self).bucket.reset();
  return new_ref(Py_None);
}

// lend(gradient): this time it is exchanged in place.
PyObject* lend_method(PyObject* self, PyObject* grad) {
  as_notice(self).lend(grad);
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
  notice.forget();
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
  self->found = nullptr;
  self->lent = false;
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

}  // namespace

py::object grad_of(PyObject* param) {
  PyObject* grad = PyObject_GetAttr(param, grad_name);
  if (!grad) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(grad);
}

// Whether the gradient was read, in memory like the slot's.
bool Notice::read(PyObject* tensor, Plain& source) const {
  return place.data && read_plain(tensor, source) && alike(source, place);
}

bool Notice::still_in_arena() const {
  Plain now;
  return place.data && read_memory(view, now) && alike(now, place) && now.data == place.data;
}

bool Notice::find(PyObject* now) {
  forget();
  Plain source;
  if (!read(now, source)) return false;
  if (source.data == place.data) return true;
  if (!is_copied(source)) return false;
  grad = new_ref(now);
  found = source.data;
  return true;
}

Notice::Filled Notice::fill() {
  const char* before = std::exchange(found, nullptr);
  Plain source;
  const bool same = read_memory(grad, source) && source.data == before && alike(source, place);
  if (!same && !(read(grad, source) && is_copied(source))) return Filled::kChanged;
  if (place.device != kHost) return Filled::kOnDevice;
  plain_copy(place.data, source.data, static_cast<size_t>(source.nbytes()));
  return Filled::kDone;
}

void Notice::lend(PyObject* tensor) {
  forget();
  grad = new_ref(tensor);
  lent = true;
}

bool Notice::deliver(PyObject* param) {
  if (!lent && !still_in_arena()) return false;
  if (PyObject_SetAttr(param, grad_name, lent ? grad : view) != 0) throw py::error_already_set();
  forget();
  return true;
}

bool Notice::at_home(PyObject* now) const {
  if (now == Py_None) return true;
  Plain source;
  if (!read_plain(now, source)) return false;
  return (place.data && alike(source, place) && source.data == place.data) ||
         !Bucket::in_an_arena(source.data);
}

void Notice::forget() {
  Py_CLEAR(grad);
  found = nullptr;
  lent = false;
}

void add_notice_type(py::module_& m) {
  grad_name = PyUnicode_InternFromString("grad");
  notice_type = add_type(m, spec);
  static PyMethodDef functions[] = {
      {"notice", make_notice, METH_O,
       "A hook that calls this function, less often when it is bound."},
      {nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace bagua
