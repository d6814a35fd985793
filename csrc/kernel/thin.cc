#include "kernel/thin.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernel/reduce.h"

namespace bagua {
namespace {

// What is left of a row by less than this is rounding, and no direction.
constexpr double kNothing = 1e-6;

class Rows {
 public:
  Rows(float* rows, int64_t columns, Isa isa) : rows_(rows), columns_(columns), isa_(isa) {}

  float* row(int64_t i) const { return rows_ + i * columns_; }
  double length(int64_t i) const { return std::sqrt(dot(i, i)); }

  // Takes from row i what the rows before it have of it.
  void straighten(int64_t i) const {
    for (int64_t before = 0; before < i; ++before)
      combine(DType::kF32, row(i), row(before), 1, -dot(i, before), columns_, isa_);
  }
  void normalize(int64_t i) const {
    const double factor = 1 / length(i);
    for (int64_t j = 0; j < columns_; ++j) row(i)[j] = static_cast<float>(row(i)[j] * factor);
  }
  // Whether it is a direction of its own.
  bool normalize_what_is_new(int64_t i) const {
    if (!(length(i) > 0)) return false;
    normalize(i);
    straighten(i);
    if (!(length(i) > kNothing)) return false;
    normalize(i);
    return true;
  }
  // The first of the axes that the rows before leave room for, which at least one does.
  void take_axis(int64_t i) const {
    const auto room = static_cast<double>(columns_ - i) / static_cast<double>(columns_);
    for (int64_t axis = 0; axis < columns_; ++axis) {
      std::fill_n(row(i), columns_, 0.0f);
      row(i)[axis] = 1;
      straighten(i);
      if (dot(i, i) >= room / 2) return;
    }
  }

 private:
  double dot(int64_t a, int64_t b) const {
    return dots(DType::kF32, row(a), row(b), columns_, isa_).ab;
  }

  float* const rows_;
  const int64_t columns_;
  const Isa isa_;
};

[[gnu::always_inline]] inline void expand_body(const Thin& thin, float* __restrict whole,
                                               float* __restrict lost, float* __restrict sums) {
  for (int64_t i = 0; i < thin.rows; ++i, whole += thin.columns, lost += thin.columns) {
    std::fill_n(sums, thin.columns, 0.0f);
    for (int64_t k = 0; k < thin.rank; ++k) {
      const float factor = thin.left[k * thin.rows + i];
      const float* __restrict right = thin.right + k * thin.columns;
      for (int64_t j = 0; j < thin.columns; ++j) sums[j] += factor * right[j];
    }
    for (int64_t j = 0; j < thin.columns; ++j) {
      lost[j] = whole[j] - sums[j];
      whole[j] = sums[j];
    }
  }
}

#define BAGUA_LOOPS(isa, attribute)                                                       \
  attribute void expand_##isa(const Thin& thin, float* whole, float* lost, float* sums) { \
    expand_body(thin, whole, lost, sums);                                                 \
  }
BAGUA_CLONES(BAGUA_LOOPS)
#undef BAGUA_LOOPS

}  // namespace

void orthonormalize(float* rows, int64_t count, int64_t columns, Isa isa) {
  const Rows all(rows, columns, isa);
  for (int64_t i = 0; i < count; ++i) {
    if (!all.normalize_what_is_new(i)) all.take_axis(i);
    all.straighten(i);  // the first time left a little
    all.normalize(i);
  }
}

void expand(const Thin& thin, float* whole, float* lost, Isa isa) {
  std::vector<float> sums(static_cast<size_t>(thin.columns));
#define BAGUA_ENTRY(isa, attribute) expand_##isa,
  constexpr void (*all[])(const Thin&, float*, float*, float*) = {BAGUA_CLONES(BAGUA_ENTRY)};
#undef BAGUA_ENTRY
  all[static_cast<int>(isa)](thin, whole, lost, sums.data());
}

}  // namespace bagua
