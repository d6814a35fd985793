#include "python/thin.h"

#include "common/errors.h"
#include "kernel/thin.h"
#include "python/objects.h"
#include "python/plain.h"

namespace bagua {
namespace {

// A matrix in the host's memory.
struct Matrix {
  explicit Matrix(const py::object& array) {
    Plain plain = {};
    if (!read_plain(array.ptr(), plain) || plain.dtype != DType::kF32 || plain.ndim != 2 ||
        plain.device != kHost)
      throw UsageError("a matrix of float32 in C order is needed, in the host's memory");
    values = reinterpret_cast<float*>(plain.data);
    rows = plain.shape[0];
    columns = plain.shape[1];
  }
  float* values;
  int64_t rows, columns;
};

void orthonormalize_rows(const py::object& matrix) {
  const Matrix all(matrix);
  if (all.rows > all.columns) throw UsageError("more rows than columns cannot be orthonormal");
  const py::gil_scoped_release others;
  orthonormalize(all.values, all.rows, all.columns);
}

void expand_thin(const py::object& left, const py::object& right, const py::object& whole,
                 const py::object& lost) {
  const Matrix l(left), r(right), w(whole), e(lost);
  if (l.rows != r.rows || w.rows != l.columns || w.columns != r.columns || e.rows != w.rows ||
      e.columns != w.columns)
    throw UsageError("left' right, whole and lost must be of one shape");
  const py::gil_scoped_release others;
  expand({l.values, r.values, l.rows, l.columns, r.columns}, w.values, e.values);
}

}  // namespace

void add_thin(py::module_& m) {
  m.def("orthonormalize", orthonormalize_rows);
  m.def("expand", expand_thin);
}

}  // namespace bagua
