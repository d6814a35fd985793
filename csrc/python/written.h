// Operations write to tensors behind their framework's back. torch is told, of many at once, before
// anybody has waited for a result: autograd must know that what it saved has changed.
#pragma once

#include "python/objects.h"

namespace bagua {

// A tensor or a list of them. Arrays of others are left out.
void note_written(PyObject* tensors);
// Of all that were noted.
void tell_written();

}  // namespace bagua
