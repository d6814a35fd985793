// What autograd calls when a gradient is there, and what it knows of that gradient.
#pragma once

#include <memory>

#include "engine/bucket.h"
#include "python/objects.h"
#include "python/plain.h"

namespace bagua {

struct Notice {
  PyObject_HEAD;
  PyObject* decide;  // called with the parameter
  std::shared_ptr<Bucket> bucket;
  int slot;
  PyObject* view;  // the slot's place in the arena, as the tensor that users get
  Plain place;     // the same; no data if it cannot be written from here
  PyObject* grad;  // what is copied into the arena, or lent; until it is delivered; or null
  char* found;     // the memory of one that is to be copied; or null
  bool lent;       // it is exchanged where it is, this time

  // Looks where the gradient is; fill() copies it if it is not in the arena yet. False: that is
  // left to the caller, as all that is in some arena's memory, which may be written to before.
  bool find(PyObject* now);
  enum class Filled {
    kDone,
    kOnDevice,  // where torch copies `grad`
    kChanged,   // another thread has given the gradient other memory, which is not read here
  };
  Filled fill();
  void lend(PyObject* tensor);
  // Makes what has been exchanged the parameter's gradient. False: that is left to the caller.
  bool deliver(PyObject* param);
  // Whether no other slot's place is what the gradient looks at. False: in doubt, too.
  bool at_home(PyObject* now) const;
  void forget();

 private:
  bool read(PyObject* tensor, Plain& source) const;
  // Users may make a tensor look at other memory, by `.data =`, and many a conversion of a model
  // does so with the gradients that it finds. At the same memory in another way, nobody does.
  bool still_in_arena() const;
};

inline Notice& as_notice(PyObject* self) { return *reinterpret_cast<Notice*>(self); }

py::object grad_of(PyObject* param);

void add_notice_type(py::module_& m);

}  // namespace bagua
